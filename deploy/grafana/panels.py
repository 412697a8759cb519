"""The panels of the dashboard: what each shows, from which metrics. `build.py` makes Grafana's JSON of them."""

from __future__ import annotations

from dataclasses import dataclass

ROUTER = 'job="$job",instance=~"$instance"'
OF_MODEL = ROUTER + ',model=~"$model"'
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, and what its lines are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph, or with `stat` one number. `unit` is Grafana's name of a unit."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    stat: bool = False
    stacked: bool = False
    # Colours of a number from these values on; the first holds from the beginning.
    steps: tuple[tuple[str, float | None], ...] = (("green", None),)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading. A collapsed one loads nothing until it is opened."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


def rate(metric: str, matchers: str = ROUTER, by: str = "") -> str:
    """Events a second, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{matchers}}}[{RATE}]))"


def quantile(q: float, metric: str, matchers: str = ROUTER, by: str = "") -> str:
    """A percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', matchers, by=labels)})"


def quantiles(metric: str, matchers: str = ROUTER) -> tuple[Query, ...]:
    """Median, 95th and 99th percentile of a histogram of seconds."""
    return tuple(Query(quantile(q, metric, matchers), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


def mean(metric: str) -> str:
    return f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}"


def value(metric: str, matchers: str = ROUTER, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{matchers}}})"


API = ROUTER + ',route=~"/v1/.*"'
REQUESTS = rate("headrace_http_requests_total", API)
API_FAILED = API + ',status=~"5.."'
FAILED = (
    f"({rate('headrace_http_requests_total', API_FAILED)} or vector(0))"
    f" + ({rate('headrace_streams_broken_total')} or vector(0))"
)
MET = ROUTER + ',result="met"'


SUMMARY = Row(
    "Service",
    (
        Panel(
            title="Requests",
            about="Requests of the API that were answered, whatever the answer.",
            queries=(Query(REQUESTS, "requests"),),
            unit="reqps",
            stat=True,
        ),
        Panel(
            title="Failed",
            about="Share of the requests that ended with a status from 500 on, or with an error inside a stream.",
            queries=(Query(f"({FAILED}) / ({REQUESTS} > 0)", "failed"),),
            unit="percentunit",
            stat=True,
            steps=(("green", None), ("orange", 0.001), ("red", 0.0144)),
        ),
        Panel(
            title="Time to first token, p95",
            about="From the arrival of a request to its first token.",
            queries=(quantiles("headrace_ttft_seconds", OF_MODEL)[1],),
            unit="s",
            stat=True,
        ),
        Panel(
            title="Time per token, p95",
            about="Mean time for each token of an answer after its first.",
            queries=(quantiles("headrace_tpot_seconds", OF_MODEL)[1],),
            unit="s",
            stat=True,
        ),
        Panel(
            title="Workers ready",
            about="Workers that take requests. A worker counts once for each router that knows it.",
            queries=(Query(value("headrace_workers", ROUTER + ',state="ready"'), "ready"),),
            stat=True,
            steps=(("red", None), ("green", 1)),
        ),
        Panel(
            title="Answers in flight",
            about="Each choice of a request counts.",
            queries=(Query(value("headrace_streams"), "answers"),),
            stat=True,
        ),
        Panel(
            title="Deadlines met",
            about="Share of the requests with a deadline for their first token that met it and --slo-tpot-ms.",
            queries=(
                Query(
                    f"{rate('headrace_slo_requests_total', MET)}"
                    f" / {rate('headrace_slo_requests_total')}",
                    "met",
                ),
            ),
            unit="percentunit",
            stat=True,
            steps=(("red", None), ("orange", 0.9), ("green", 0.99)),
        ),
        Panel(
            title="Version",
            about="Routers by the version that they run.",
            queries=(Query(value("headrace_build_info", by="version"), "{{version}}"),),
            stat=True,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            title="Time to first token",
            about="From the arrival of a request to its first token.",
            queries=quantiles("headrace_ttft_seconds", OF_MODEL),
            unit="s",
        ),
        Panel(
            title="Inter-token latency",
            about="From step to step of one answer. A step of a worker that drafts may bring several tokens.",
            queries=quantiles("headrace_itl_seconds", OF_MODEL),
            unit="s",
        ),
        Panel(
            title="Time per output token",
            about="Mean time for each token of an answer after its first, over the answers that ended.",
            queries=quantiles("headrace_tpot_seconds", OF_MODEL),
            unit="s",
        ),
        Panel(
            title="Whole requests",
            about="From the arrival of a request to the end of its last choice.",
            queries=quantiles("headrace_request_seconds", OF_MODEL),
            unit="s",
        ),
        Panel(
            title="Wait for a worker",
            about="Time in the router's queue.",
            queries=quantiles("headrace_queue_seconds", OF_MODEL),
            unit="s",
        ),
        Panel(
            title="Template and tokenisation",
            about="Time for the chat template and the tokeniser, the wait for a thread included.",
            queries=quantiles("headrace_encode_seconds"),
            unit="s",
        ),
    ),
)

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            title="Tokens",
            about="Tokens of prompts, those of them that a cache had, and tokens generated.",
            queries=(
                Query(rate("headrace_prompt_tokens_total", OF_MODEL), "prompts"),
                Query(rate("headrace_cached_tokens_total", OF_MODEL), "of them cached"),
                Query(rate("headrace_completion_tokens_total", OF_MODEL), "answers"),
            ),
        ),
        Panel(
            title="Requests by model",
            about="Requests for answers and vectors, by model and by how they ended. `unknown`: models nobody serves.",
            queries=(
                Query(
                    rate("headrace_requests_total", OF_MODEL, by="model, outcome"),
                    "{{model}} {{outcome}}",
                ),
            ),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            title="Ends of answers",
            about="Choices that came to their end, by why.",
            queries=(
                Query(rate("headrace_finish_reasons_total", OF_MODEL, by="reason"), "{{reason}}"),
            ),
            unit="ops",
            stacked=True,
        ),
        Panel(
            title="Lengths",
            about="Tokens of prompts and of answers of the requests that finished.",
            queries=tuple(
                Query(
                    quantile(q, f"headrace_request_{what}_tokens", OF_MODEL), f"{what} p{q * 100:g}"
                )
                for what in ("prompt", "output")
                for q in (0.5, 0.95)
            ),
        ),
        Panel(
            title="Requests by route",
            about="HTTP requests that were answered.",
            queries=(Query(rate("headrace_http_requests_total", by="route"), "{{route}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            title="Requests by status",
            about="Status and kind of the error.",
            queries=(
                Query(
                    rate("headrace_http_requests_total", by="status, error"), "{{status}} {{error}}"
                ),
            ),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            title="Connections",
            about="Connections of clients that are open, and those that were closed or refused for want of room.",
            queries=(
                Query(value("headrace_http_connections"), "open"),
                Query(value("headrace_tls_handshakes_open"), "in their TLS handshake"),
                Query(rate("headrace_http_connections_refused_total"), "refused a second"),
                Query(rate("headrace_http_connections_evicted_total"), "evicted a second"),
                Query(rate("headrace_http_connections_flooding_total"), "floods a second"),
            ),
        ),
        Panel(
            title="Tokens by key",
            about="Tokens of keys that have a name.",
            queries=(Query(rate("headrace_key_tokens_total", by="key, kind"), "{{key}} {{kind}}"),),
            stacked=True,
        ),
        Panel(
            title="Refused by limits of keys",
            about="Requests that were refused because a key had used what it may.",
            queries=(
                Query(rate("headrace_key_limited_total", by="key, kind"), "{{key}} {{kind}}"),
            ),
            unit="reqps",
        ),
    ),
)

QUEUE = Row(
    "Queue",
    (
        Panel(
            title="Waiting by class",
            about="Legs of requests that wait for a worker with room.",
            queries=(Query(value("headrace_queue_class_requests", by="class"), "{{class}}"),),
            stacked=True,
        ),
        Panel(
            title="Longest wait",
            about="How long the oldest request in the queue has waited.",
            queries=(
                Query(
                    f"max by (instance) (headrace_queue_oldest_seconds{{{ROUTER}}})", "{{instance}}"
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Waiting tokens",
            about="Prompt tokens of the legs that wait, and answers in flight that wait for a worker to go on with.",
            queries=(
                Query(value("headrace_queue_tokens"), "prompt tokens"),
                Query(value("headrace_returning_requests"), "answers to go on with"),
            ),
        ),
        Panel(
            title="Refused",
            about="Requests turned away on arrival or out of the queue, by the bound or deadline against them.",
            queries=(Query(rate("headrace_refused_total", by="reason"), "{{reason}}"),),
            unit="reqps",
            stacked=True,
        ),
    ),
)

CACHE = Row(
    "KV cache",
    (
        Panel(
            title="Hit rate",
            about="Share of the prompt tokens that came from a prefix cache, and of promised tokens that did not.",
            queries=(
                Query(
                    f"{rate('headrace_cached_tokens_total', OF_MODEL)}"
                    f" / {rate('headrace_prompt_tokens_total', OF_MODEL)}",
                    "hits",
                ),
                Query(
                    f"{rate('headrace_missing_tokens_total')} / {rate('headrace_promised_tokens_total')}",
                    "promised and missing",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="KV blocks in use",
            about="Share of a worker's blocks that running requests hold.",
            queries=(
                Query(
                    f"max by (worker) (headrace_worker_blocks_used{{{OF_MODEL}}}"
                    f" / (headrace_worker_blocks{{{OF_MODEL}}} > 0))",
                    "{{worker}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="KV blocks cached",
            about="Share of a worker's blocks that the prefix cache alone holds.",
            queries=(
                Query(
                    f"max by (worker) (headrace_worker_blocks_cached{{{OF_MODEL}}}"
                    f" / (headrace_worker_blocks{{{OF_MODEL}}} > 0))",
                    "{{worker}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Block index",
            about="Blocks that the router knows of, and the memory that they take.",
            queries=(
                Query(value("headrace_index_blocks"), "blocks"),
                Query(value("headrace_index_bytes"), "bytes"),
            ),
        ),
        Panel(
            title="KV transfers",
            about="Pulls of KV between workers, by what moved them and how they ended.",
            queries=(
                Query(
                    rate("headrace_transfers_total", by="backend, outcome"),
                    "{{backend}} {{outcome}}",
                ),
            ),
            unit="ops",
        ),
        Panel(
            title="Duration of KV transfers",
            about="Pulls that went well.",
            queries=quantiles("headrace_transfer_seconds"),
            unit="s",
        ),
    ),
)
