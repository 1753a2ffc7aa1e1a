"""States as e4m3 with a scale for every token and layer: half the bytes of bfloat16, 2 to 3 % from them in L2.

Magnitudes of layers differ by orders, so that one scale for all layers of a token would leave nothing of
the small ones. Scales are powers of two: a decoded value is then exactly what e4m3 holds.
Legend: R tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

from stages.hidden_states.rows import row_pieces

# Bits of bfloat16: 8 of the exponent over 7 of the mantissa; of e4m3: 4 over 3, bias 7, largest 448 = 1.75 * 2**8.
_MANTISSA_BITS, _BIAS = 7, 127
_ABOVE_1_75 = 0x1F  # added to a bfloat16's bits, carries into the exponent when the mantissa is above 1.75
_LEAST_EXPONENT = -120  # of a scale; its inverse must be finite in fp32
_SIGN_AND_VALUE = np.int16(np.uint16(0x87F0).astype(np.int16))
_E4M3_IN_BFLOAT16 = 2.0**120  # bits of e4m3, widened, read as bfloat16: the difference of the two biases
_ELEMENTS_AT_ONCE = 1 << 15  # in a core's cache, and few enough for torch to stay in the reader's thread


def encode(states_RLD: torch.Tensor, peaks_RL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (uint8 [R, L, D], bits of e4m3) and scales (fp32 [R, L]) of finite bfloat16 states.

    `peaks_RL`: of `peak_bits`. A scale is the least power of two that keeps its row within e4m3.
    """
    exponents_RL = ((peaks_RL.int() + _ABOVE_1_75) >> _MANTISSA_BITS) - (_BIAS + 8)
    scales_RL = torch.ldexp(torch.ones_like(exponents_RL, dtype=torch.float32), exponents_RL.clamp(_LEAST_EXPONENT))
    values_RLD = torch.empty_like(states_RLD, dtype=torch.float8_e4m3fn)
    for rows in row_pieces(states_RLD):
        values_RLD[rows] = (states_RLD[rows].float() / scales_RL[rows, :, None]).to(torch.float8_e4m3fn)
    return values_RLD.view(torch.uint8), scales_RL


def decode(values_RLD: torch.Tensor, scales_RL: torch.Tensor, into_RLD: torch.Tensor) -> None:
    """Fill `into_RLD` (bfloat16) with values times scales, as `encode` gives them; all on the CPU, contiguous.

    Integer passes: torch's own conversion looks at one element at a time (0.1 GB/s a core; this 2 to 3).
    """
    width = into_RLD.shape[-1]
    states_ND, factors_N1 = into_RLD.view(-1, width), scales_RL.view(-1, 1).bfloat16()
    bits_ND, bytes_ND = states_ND.view(torch.int16).numpy(), values_RLD.view(-1, width).numpy().view(np.int8)
    step = max(1, _ELEMENTS_AT_ONCE // width)
    for start in range(0, len(states_ND), step):
        rows = slice(start, start + step)
        bits = bits_ND[rows]
        np.copyto(bits, bytes_ND[rows])  # extends the sign over the upper byte
        np.left_shift(bits, 4, out=bits)
        np.bitwise_and(bits, _SIGN_AND_VALUE, out=bits)
        states_ND[rows].mul_(_E4M3_IN_BFLOAT16).mul_(factors_N1[rows])
