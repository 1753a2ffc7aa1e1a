"""fp8: every value as e4m3 defines it, and the error that it costs."""

import pytest
import torch

from stages.hidden_states.fp8 import decode, encode
from stages.hidden_states.rows import peak_bits


def there_and_back(states: torch.Tensor) -> torch.Tensor:
    values, scales = encode(states, peak_bits(states))
    assert values.nbytes == states.nbytes // 2
    found = torch.empty_like(states)
    decode(values, scales, found)
    exact = values.view(torch.float8_e4m3fn).double() * scales[..., None].double()
    assert torch.equal(found.double(), exact)
    return found


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 3e38, 1e-33])
def test_every_code_is_decoded_exactly(scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes[(codes & 0x7F) != 0x7F].view(1, 1, -1)  # without the two NaNs
    exponent = torch.tensor(scale).log2().floor().clamp(max=119)
    scales = torch.exp2(exponent).view(1, 1)
    found = torch.empty(values.shape, dtype=torch.bfloat16)
    decode(values, scales, found)
    assert torch.equal(found.double(), values.view(torch.float8_e4m3fn).double() * scales.double())


def test_every_layer_keeps_its_shape_whatever_its_magnitude() -> None:
    """As SmolLM2's: layer 2 reaches 292, layer 15 24,960 in a few columns of the first token."""
    random = torch.Generator().manual_seed(0)
    states = torch.randn(512, 5, 576, generator=random) * torch.tensor([1e-3, 0.4, 3.0, 300.0, 1e30])[:, None]
    states[0, 1, 7], states[0, 2, 7] = 292.0, 24960.0
    states = states.bfloat16()
    found = there_and_back(states)
    error_L = (found.float() - states.float()).double().norm(dim=(0, 2)) / states.double().norm(dim=(0, 2))
    assert error_L.max() < 0.04
    error_RL = (found.double() - states.double()).norm(dim=-1) / states.double().norm(dim=-1)
    assert error_RL.max() < 0.04  # so it is for every single row


@pytest.mark.parametrize("peak", [448.0, 449.0, 1.75, 1.76, 1.0, 3e38, 1e-30])
def test_no_peak_overflows_or_is_lost(peak: float) -> None:
    states = torch.tensor([peak, -peak, 0.0, peak / 3]).bfloat16().view(1, 1, 4)
    found = there_and_back(states).double()
    assert ((found - states.double()).abs() <= states.double().abs() / 16).all()


def test_vanishing_rows_stay_finite() -> None:
    states = torch.full((1, 1, 4), torch.finfo(torch.bfloat16).tiny).bfloat16()
    assert there_and_back(states).isfinite().all()
