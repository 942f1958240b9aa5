"""Groups that say nothing: equal rewards, one sample, nothing scorable, everything masked. All stays finite."""

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import advantages

N, T, GROUPS = 12, 4, 5


@jax.jit
def every_advantage(reward, group, valid, action_mask):
    """Returns each estimate of rows; those of tokens are zero where the mask is."""
    rows = {
        "zscore": advantages.group_zscore(reward, group, valid, num_groups=GROUPS),
        "centered": advantages.group_centered(reward, group, valid, num_groups=GROUPS),
        "leave one out": advantages.leave_one_out(reward, group, valid, num_groups=GROUPS),
        "batch": advantages.group_mean_batch_std(reward, group, valid, num_groups=GROUPS),
    }
    token_reward = jnp.where(action_mask, reward[:, None], 0.0)
    tokens = {
        "whitened returns": advantages.whitened_returns(token_reward, action_mask, valid, discount=0.9),
        "whitened": advantages.whitened_centered(reward, group, valid, action_mask, num_groups=GROUPS),
    }
    return rows, tokens


def test_degenerate_groups_are_finite_and_teach_nothing(trials):
    draw = np.random.default_rng(0)
    for _ in range(trials(300, 10_000)):
        group = draw.integers(0, draw.integers(1, GROUPS + 1), N).astype(np.int32)
        reward = draw.choice([0.0, 1.0, -1.0, 1e6, 1e-30, 0.1], N).astype(np.float32)
        equal = draw.random() < 0.5
        if equal:
            reward = draw.choice([0.0, 1.0, -3.0, 1e6, 0.1], GROUPS).astype(np.float32)[group]
        valid = draw.random(N) < draw.choice([0.0, 0.1, 0.5, 1.0])
        reward = np.where(valid, reward, np.float32(np.nan))
        action_mask = (np.arange(T) < draw.integers(0, T + 1, N)[:, None]) & valid[:, None]
        rows, tokens = jax.device_get(every_advantage(reward, group, valid, action_mask))
        members = np.bincount(group[valid], minlength=GROUPS)[group]
        for name, given in rows.items():
            assert np.isfinite(given).all() and not given[~valid].any(), name
            assert not given[valid & (members == 1)].any(), name
            assert not equal or np.abs(given[valid] / np.maximum(np.abs(reward[valid]), 1)).max(initial=0) < 1e-3, name
        for name, given in tokens.items():
            assert np.isfinite(given).all() and not given[~action_mask].any(), name
