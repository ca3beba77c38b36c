"""Prometheus metrics (spec/api.md 17): what the server counts itself, and the engine's counters.

A registry per server, so that several servers in one process do not share numbers. Names follow
vLLM; no label holds user data. Engine numbers are read from its latest EngineStats at scrape.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twining.engine.request import EngineStats, Timings

LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
COUNT_BUCKETS = (*(m * 10**e for e in range(6) for m in (1, 2, 5)), 1_000_000)
LABELS = ("model_name", "engine")
FINISHED = {"stop": "stop", "tool_calls": "stop", "length": "length", "cancelled": "abort"}


class Metrics:
    """All metrics of one server."""

    def __init__(self, model_name: str = "") -> None:
        self._registry = CollectorRegistry()
        self._values = (model_name, "0")
        self._success = Counter(
            "vllm:request_success",
            "requests that ended, by reason",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "requests refused because the queue was full",
            ("model_name", "reason"),
            registry=self._registry,
        )
        self._tool_calls = Counter(
            "glm:tool_calls", "calls in replies", (*LABELS, "outcome"), registry=self._registry
        )
        self._reasoning = self._counter("glm:reasoning_tokens", "tokens of reasoning")
        self._reasoning_only = self._counter("glm:reasoning_only", "replies without an answer")
        self._warnings = Counter(
            "glm:warnings", "warning codes sent", (*LABELS, "code"), registry=self._registry
        )
        self._prompt = self._histogram("vllm:request_prompt_tokens", COUNT_BUCKETS)
        self._generated = self._histogram("vllm:request_generation_tokens", COUNT_BUCKETS)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", TTFT_BUCKETS)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", TOKEN_BUCKETS
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", LATENCY_BUCKETS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", LATENCY_BUCKETS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", LATENCY_BUCKETS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", LATENCY_BUCKETS)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        words = name.partition(":")[2].replace("_", " ")
        return Histogram(name, words, LABELS, buckets=buckets, registry=self._registry)

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Read the engine's counters from `stats` at every scrape."""
        self._registry.register(_EngineCollector(stats, self._values))

    def rejected(self) -> None:
        """A request was refused with queue_full."""
        self._rejections.labels(self._values[0], "max_num_queued_reqs").inc()

    def warned(self, codes: list[str]) -> None:
        """Codes of x-warnings; names of ignored fields are cut off, they come from the client."""
        for code in codes:
            self._warnings.labels(*self._values, code.partition(":")[0]).inc()

    def tool_call(self, outcome: str) -> None:
        """One call in a reply: ok, unknown, recovered or truncated."""
        self._tool_calls.labels(*self._values, outcome).inc()

    def finished(
        self,
        reason: str,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        reasoning_tokens: int,
        reasoning_only: bool,
        total_s: float,
        timings: Timings,
    ) -> None:
        """One choice ended. reason: the reply's finish_reason, "cancelled" or "error"."""
        labels = self._values
        self._success.labels(*labels, FINISHED.get(reason, "error")).inc()
        self._reasoning.labels(*labels).inc(reasoning_tokens)
        self._reasoning_only.labels(*labels).inc(int(reasoning_only))
        self._prompt.labels(*labels).observe(prompt_tokens)
        self._generated.labels(*labels).observe(completion_tokens)
        self._e2e.labels(*labels).observe(total_s)
        self._queue.labels(*labels).observe(timings.queue_s)
        self._prefill.labels(*labels).observe(timings.prefill_s)
        self._decode.labels(*labels).observe(timings.decode_s)
        if completion_tokens:
            self._ttft.labels(*labels).observe(timings.ttft_s)
        if completion_tokens > 1:
            self._per_token.labels(*labels).observe(timings.decode_s / (completion_tokens - 1))

    def render(self) -> bytes:
        """Text exposition format 0.0.4."""
        return generate_latest(self._registry)


class _EngineCollector:
    """The engine's own numbers, taken over as they are."""

    def __init__(self, stats: Callable[[], EngineStats], values: tuple[str, ...]) -> None:
        self._stats = stats
        self._values = values

    def collect(self) -> Iterator[Metric]:
        """One sample per metric."""
        stats = self._stats()
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "requests running", stats.running),
            ("vllm:num_requests_waiting", "requests waiting", stats.waiting),
            ("vllm:kv_cache_usage_perc", "share of cache pages in use", usage),
            ("glm:checkpoints", "reusable prefixes", stats.checkpoints),
            ("glm:checkpoint_pages", "cache pages that only they hold", stats.pages_cached),
            ("glm:checkpoint_bytes", "host memory of their planes", stats.checkpoint_bytes),
            ("glm:parked_bytes", "host memory of preempted requests", stats.parked_bytes),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, text, value in (
            ("vllm:prompt_tokens", "prompt tokens", stats.prompt_tokens),
            ("vllm:prompt_tokens_cached", "prompt tokens reused", stats.cached_tokens),
            ("vllm:prefix_cache_queries", "prompt tokens asked of the cache", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "prompt tokens found in the cache", stats.cached_tokens),
            ("vllm:generation_tokens", "tokens generated", stats.generated_tokens),
            ("glm:checkpoint_hits", "requests that found a prefix", stats.prefix_hits),
            ("glm:checkpoint_misses", "requests that found none", stats.prefix_misses),
            ("glm:checkpoint_mismatches", "misses that did not match", stats.prefix_mismatches),
            ("glm:checkpoint_evictions", "prefixes given up", stats.prefix_evictions),
            ("vllm:num_preemptions", "preemptions", stats.preemptions),
            ("vllm:spec_decode_num_drafts", "verify steps with drafts", stats.draft_steps),
            ("vllm:spec_decode_num_draft_tokens", "tokens drafted", stats.num_drafted),
            ("vllm:spec_decode_num_accepted_tokens", "drafts accepted", stats.num_accepted),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._values, value)
            yield counter
