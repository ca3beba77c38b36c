"""Small Python functions: the prompt names the function and its parameters, the answer is one code
block.

Function name, parameter names and the constant together are split. The checker runs the answer on
fresh inputs in `sandbox.run_function` and compares with the reference body.
"""

import re
from random import Random

from twining.demo.tasks.base import Example, Split, assistant, draw, user
from twining.demo.tasks.python_specs import SPECS, Spec
from twining.demo.tasks.sandbox import SandboxError, run_function

_ASK = (
    "Write a Python function {sig} that {does}.",
    "Write a Python function {sig} that {does}. Reply with code only.",
    "Please write a function {sig} in Python that {does}.",
    "Implement {sig} in Python. It {does}.",
    "Define a Python function {sig}. It {does}.",
    "I need a Python function {sig} that {does}.",
    "Code a function {sig} that {does}.",
)
_FENCE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
NUM_CASES = 4


def _source(spec: Spec, name: str, params: tuple[str, ...], k: int) -> str:
    slots = dict(zip("ab", params, strict=False))
    body = "".join("    " + line.format(k=k, **slots) + "\n" for line in spec.body)
    return f"def {name}({', '.join(params)}):\n{body}"


def make(rng: Random, split: Split, effort: str) -> Example:
    """One function request."""

    def draw_form() -> tuple[str, tuple[Spec, str, tuple[str, ...], int]]:
        spec = rng.choice(SPECS)
        name, params, k = rng.choice(spec.names), rng.choice(spec.params), rng.randint(2, 12)
        return f"python {name} {params} {k if '{k}' in ''.join(spec.body) else ''}", (
            spec,
            name,
            params,
            k,
        )

    spec, name, params, k = draw(split, draw_form)
    does = rng.choice(spec.does).format(k=k, **dict(zip("ab", params, strict=False)))
    text = rng.choice(_ASK).format(sig=f"{name}({', '.join(params)})", does=does)
    source = _source(spec, name, params, k)
    reasoning = f"{name} takes {' and '.join(params)}. It {does}."
    reply = assistant(f"```python\n{source}```", effort, reasoning)
    cases = (
        [tuple(d(rng) for d in spec.draws) for _ in range(NUM_CASES)]
        if split is Split.HELDOUT
        else []
    )
    check = {"name": name, "source": source, "cases": cases}
    return Example("python_functions", (user(text), reply), effort, check=check)


def extract_code(content: str) -> str:
    """The first code block, or the whole text."""
    match = _FENCE.search(content)
    return match.group(1) if match else content


def check(example: Example, content: str) -> bool:
    """True when the answer's function gives the reference results on every case."""
    name = example.check["name"]
    try:
        for args in example.check["cases"]:
            want = run_function(example.check["source"], name, args)
            got = run_function(extract_code(content), name, args)
            if got != want or type(got) is not type(want):
                return False
    except SandboxError:
        return False
    return True
