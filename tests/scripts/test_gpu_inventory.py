"""What is read out of the compilers' texts: small ones, shaped like those of ptxas, nvdisasm and XLA."""

import collections

import pytest
from gpulib.census import Launch, parse
from gpulib.inventory import FIGURES, inventory
from gpulib.step_programs import copies, graph_grouping

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    40 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 40 bytes cumulative stack size
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 54.166 ms
"""
# A prologue; a loop of 9 whose exit is predicated and which jumps over two instructions; a loop in a loop; the last branch.
SASS = """	.section	.text.other,"ax",@progbits
.text.other:
        /*0000*/                   LDS.U8 R1, [R2] ;
.L_x_9:
        /*0010*/                   BRA `(.L_x_9);
	.section	.text.attend,"ax",@progbits
.text.attend:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64] ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3+0x10], desc[UR4][R4.64], P1 ;
        /*0040*/                   LDGSTS.E.64 [R3+0x20], desc[UR4][R4.64] ;
        /*0050*/               @P2 BRA `(.L_x_2) ;
        /*0060*/                   I2F.S8 R6, R7 ;
        /*0070*/                   LDS.U8 R7, [R8] ;
.L_x_2:
        /*0080*/                   HMMA.16816.F32.BF16 R8, R12, R16, R8 ;
        /*0090*/                   HMMA.1688.F32.TF32 R8, R12, R16, R8 ;
        /*00a0*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*00b0*/               @P0 BRA `(.L_x_1) ;
.L_x_3:
        /*00c0*/                   FADD R1, R2, R3 ;
.L_x_4:
        /*00d0*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*00e0*/               @P1 BRA `(.L_x_4) ;
        /*00f0*/               @P3 BRA `(.L_x_3) ;
.L_x_0:
        /*0100*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0110*/                   EXIT ;
.L_x_5:
        /*0120*/                   BRA `(.L_x_5);
"""


def test_a_kernel_among_others():
    census = parse(REPORT, SASS, "attend")
    assert (census.registers, census.spilled, census.static_shared) == (80, 0, 1024)
    assert sum(census.instructions.values()) == 19 and not census.wgmma_serialized
    largest, other = census.loops
    assert sum(largest.values()) == 9 and other == collections.Counter(["LDG.E.128.CONSTANT", "BRA"])
    assert census.count("BRA") == 6 and census.count("BRA", loop=True) == 2
    assert parse(REPORT, SASS, "other").spilled == 32 and parse(REPORT, SASS, "other").loops == ()
    assert parse("wgmma.mma_async instructions are serialized" + REPORT, SASS, "attend").wgmma_serialized
    with pytest.raises(KeyError):
        parse(REPORT, SASS, "att")


def test_figures():
    figures = inventory(parse(REPORT, SASS, "attend"), Launch("attend", (8, 8, 1), 128, 2048), loop_kv_bytes=1024)
    assert figures.keys() == FIGURES.keys()
    assert figures == {
        "registers": 80, "spilled": 0, "threads": 128, "shared_memory": 3072, "cp_async_16": 2, "cp_async_narrow": 1,
        "tma": 0, "loads_16": 1, "mma": 2, "wgmma": 1, "wgmma_serialized": 0, "byte_lds": 1, "int_to_float": 1, "tf32": 1,
        "loop_instructions": 9, "smallest_loop_instructions": 2, "loop_instructions_per_kv_byte": 9 * 4 / 1024,
    }  # fmt: skip


def test_copies_in_compiled_hlo():
    hlo = """
  %copy.3 = bf16[64,8]{1,0} copy(%p)
  ROOT %t.1 = bf16[8,64]{1,0:T(8)} transpose(%p), dimensions={1,0}
  %small = bf16[8,8]{1,0} copy(%q)
  %start = (bf16[512]{0}, bf16[512]{0}, u32[]) copy-start(%p)
  %add = bf16[64,8]{1,0} add(%p, %copy.3)
"""
    assert copies(hlo, {512}) == ["%copy.3", "%t.1", "%start"] and copies(hlo, {64}) == ["%small"]


def test_graphs():
    thunks = """000: kCommandBuffer [source]
    001: kCustomKernel [source] a grid: [1, 1, 1]
002: kCustomKernel [prev=000] b grid: [1, 1, 1]
003: kWhile [prev=002]
    000: kCommandBuffer [source]
        001: kCustomKernel [source] c grid: [1, 1, 1]
        002: kWhile [source]
            003: kCustomKernel [source] d grid: [1, 1, 1]
    004: kCustomKernel [source] e grid: [1, 1, 1]
    005: kCopy [source]
"""
    assert graph_grouping(thunks) == (2, 2)
