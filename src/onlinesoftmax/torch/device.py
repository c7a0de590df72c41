from ..core.device import from_torch as from_torch
