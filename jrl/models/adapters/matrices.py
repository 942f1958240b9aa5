"""The matrices in a decoder's layers, and which axes of each are inputs. The other axes are outputs, except the expert
axis."""

from __future__ import annotations

_PLAIN = {"q": (0,), "k": (0,), "v": (0,), "o": (0, 1), "gate": (0,), "up": (0,), "down": (0,), "q_gate": (0,)}
_MLP = ("gate", "up", "down")
# The names that LoRA.targets can match, with EXPERTS. Heads and MLPs of another shape have a prefix.
ADAPTABLE = {**_PLAIN, **{f"full_{name}": axes for name, axes in _PLAIN.items() if name not in _MLP},
             **{f"shared_mlp_{name}": _PLAIN[name] for name in _MLP}}  # fmt: skip
EXPERTS = {f"expert_{name}": (1,) for name in _MLP}
MATRICES = {**ADAPTABLE, **EXPERTS, "input_gate": (0,), "input_out": (0,),
            "linear_q": (0,), "linear_k": (0,), "linear_v": (0,), "linear_gate": (0,), "linear_o": (0, 1)}  # fmt: skip
