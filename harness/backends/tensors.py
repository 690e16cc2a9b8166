"""What both backends do alike with torch tensors."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gemm(x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor) -> None:
    """out = sum over weights of x @ w, one GEMM per weight, on the calling thread or torch's current stream."""
    torch.mm(x, weights[0], out=out)
    for weight in weights[1:]:
        out.addmm_(x, weight)
