"""What this machine's processor can do."""

import torch


def multiplies_bf16() -> bool:
    """Return whether this CPU has bf16 instructions. PyTorch emulates them, several times slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
