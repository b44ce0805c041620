"""Products in 16 bits, accumulated in float32."""

import torch

from shoal.engine.kernels.add_product import add_product
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS


def test_operator() -> None:
    """Registrations: schema and fake tensors; the example compares values."""
    d_y, x = torch.randn(5, 3, dtype=torch.bfloat16), torch.randn(5, 4, dtype=torch.bfloat16)
    for fresh in (True, False):
        torch.library.opcheck(add_product.definition, (torch.zeros(3, 4), d_y, x, fresh), test_utils=OPERATOR_CHECKS)
