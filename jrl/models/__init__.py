"""Model families by name."""

from jrl.models import decoder

FAMILIES = {"Decoder": decoder.MODEL}
