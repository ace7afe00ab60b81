"""A file of kernels as `rlt_dist.ops.triton` has them, with what can be wrong with one."""

from collections.abc import Iterator

import triton
import triton.language as tl

from rlt_dist.ops.triton.build import Build
from rlt_dist.ops.triton.shapes import Shapes


@triton.jit
def _product(a, b, out, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """out [rows, WIDTH] = a [rows, WIDTH] b [WIDTH, WIDTH], the sum in float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i, j = tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH)[:, None]
    x = tl.load(a + row * WIDTH + i, mask=row < rows, other=0.0)
    y = tl.load(b + j * WIDTH + i)
    if EXACT:
        z = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        z = tl.dot(x, y)
    tl.store(out + row * WIDTH + i, z, mask=row < rows)


def builds(shapes: Shapes) -> Iterator[Build]:
    pointer = f"*{shapes.dtype}"
    signature = {"a": pointer, "b": pointer, "out": "*fp32", "rows": "i32"}

    def build(name: str, rows: int, width: int, exact: bool) -> Build:
        constants = {"ROWS": rows, "WIDTH": width, "EXACT": exact}
        return Build(name, _product, signature, constants, product=True)

    yield build("product", 64, shapes.width, exact=False)
    if shapes.lanes == 1:  # what can be wrong
        yield build("exact", 16, 16, exact=True)
        yield build("large", 256, 256, exact=False)
        yield build("impossible", 48, 16, exact=False)
