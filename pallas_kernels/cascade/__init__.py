from pallas_kernels.cascade.api import cascade_attention as cascade_attention
from pallas_kernels.cascade.groups import RowGroups as RowGroups
