from pallas_kernels.kv_write.api import kv_write as kv_write
