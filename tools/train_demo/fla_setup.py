"""Pins one launch configuration per fla-core kernel, so that a run does not spend minutes
autotuning.

fla-core reads configurations from the folder named by FLA_CONFIG_DIR when FLA_CACHE_MODE allows it;
both must be set before it is imported. The values suit head size 64 on Hopper and are only a matter
of speed.
"""

import json
import os
import tempfile
from pathlib import Path

CONFIGS: dict[str, tuple[dict[str, int], int, int]] = {  # kernel -> (block sizes, warps, stages)
    "chunk_local_cumsum_vector_kernel": ({"BS": 64}, 4, 2),
    "chunk_kda_fwd_kernel_intra_sub_chunk": ({}, 2, 2),
    "chunk_kda_fwd_kernel_inter_solve_fused": ({"BK": 64}, 4, 2),
    "recompute_w_u_fwd_kda_kernel": ({}, 4, 2),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 2),
    "chunk_gla_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 2),
    "chunk_kda_bwd_kernel_dAv": ({}, 4, 2),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4, 2),
    "chunk_kda_bwd_kernel_wy_dqkg_fused": ({"BK": 64, "BV": 64}, 4, 2),
    "chunk_kda_bwd_kernel_intra": ({}, 4, 2),
}


def pin_kernel_configs() -> Path:
    """Write the configuration files and point fla-core at them. Returns the folder."""
    folder = Path(tempfile.mkdtemp(prefix="fla-configs-"))
    for kernel, (blocks, warps, stages) in CONFIGS.items():
        config = {"kwargs": blocks, "num_warps": warps, "num_stages": stages, "num_ctas": 1}
        (folder / f"{kernel}.json").write_text(json.dumps({"default_config": config}))
    os.environ["FLA_CONFIG_DIR"] = str(folder)
    os.environ["FLA_CACHE_MODE"] = "full"
    return folder
