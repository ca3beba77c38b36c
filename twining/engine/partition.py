"""Which layers each stage runs: as the configuration says, or balanced by bytes. Pure.

Source: design.md "Process model"; spec/performance.md 4.4. A stage has at least one layer; the
embedding counts for the first stage, the head and the MTP block for the last.
"""

from collections.abc import Sequence

from twining.errors import ConfigError


def resolve_partition(
    text: str, num_stages: int, layer_costs: Sequence[int], *, first_cost: int, last_cost: int
) -> tuple[int, ...]:
    """Layers per stage. text: "23,22", or "" for a balanced division.

    layer_costs: cost of each layer, bytes say; first_cost and last_cost come on top of the first
    and the last stage. Raises ConfigError when the model has other or too few layers.
    """
    num_layers = len(layer_costs)
    if num_stages > num_layers:
        raise ConfigError(
            f"stages={num_stages}, but the model has {num_layers} layers and a stage needs one;"
            f" use stages={num_layers} or fewer"
        )
    even = balance(layer_costs, num_stages, first_cost=first_cost, last_cost=last_cost)
    if not text:
        return even
    parts = parse_partition(text)
    if sum(parts) != num_layers:
        raise ConfigError(
            f"partition={text!r} has {sum(parts)} layers, the model has {num_layers};"
            f" use {','.join(map(str, even))} for example"
        )
    return parts


def parse_partition(text: str) -> tuple[int, ...]:
    """Layers per stage from "23,22". Raises ConfigError for anything else."""
    words = text.split(",")
    parts = [int(w) if len(w) <= 4 and w.isascii() and w.isdigit() else 0 for w in words]
    if min(parts) < 1:
        raise ConfigError(
            f"partition={text[:60]!r} is not a list of layers per stage; write it as 23,22"
        )
    return tuple(parts)


def balance(
    costs: Sequence[int], num_stages: int, *, first_cost: int = 0, last_cost: int = 0
) -> tuple[int, ...]:
    """The division into runs whose costliest run is cheapest; earlier stages are the larger ones
    among equals. Needs 1 <= num_stages <= len(costs).
    """
    weights = list(costs)
    weights[0] += first_cost
    weights[-1] += last_cost
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    # best[n]: the smallest maximum for the first n layers, and the layers of each stage.
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        n: (total[n], (n,)) for n in range(1, len(total))
    }
    for stage in range(2, num_stages + 1):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for n in range(stage, len(total)):
            # The latest cut among equals comes first, so that early stages are the larger ones.
            cut = min(
                range(n - 1, stage - 2, -1), key=lambda c: max(best[c][0], total[n] - total[c])
            )
            most, parts = best[cut]
            found[n] = (max(most, total[n] - total[cut]), (*parts, n - cut))
        best = found
    return best[len(costs)][1]
