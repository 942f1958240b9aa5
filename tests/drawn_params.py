"""Random parameters drawn by NumPy: `contract.init` compiles a program for every shape."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.contract import is_spec


def drawn_params(spec, seed=0):
    """Returns parameters as `contract.init` has them, with other digits: each from its name and the seed."""

    def draw(path, s):
        if s.scale is None:
            return jnp.asarray(np.ones(s.shape, s.dtype))
        rng = np.random.default_rng([seed, zlib.crc32(jax.tree_util.keystr(path).encode())])
        return jnp.asarray((s.scale * rng.normal(size=s.shape)).astype(s.dtype))

    return jax.tree_util.tree_map_with_path(draw, spec, is_leaf=is_spec)
