from pallas_kernels.decode_attention.api import decode_attention as decode_attention
from pallas_kernels.decode_attention.api import plan_decode as plan_decode
from pallas_kernels.decode_attention.plan import SplitPlan as SplitPlan
