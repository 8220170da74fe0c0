from pallas_kernels.block_copy.api import block_copy as block_copy
