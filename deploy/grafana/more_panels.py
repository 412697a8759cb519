"""The panels about workers, faults and the router itself."""

from __future__ import annotations

from .panels import (
    OF_MODEL,
    RATE,
    ROUTER,
    Panel,
    Query,
    Row,
    mean,
    quantile,
    quantiles,
    rate,
    value,
)

PREDICTIONS = Row(
    "Predictions",
    (
        Panel(
            title="Error of the predicted time to first token",
            about="Distance between predicted and actual time from placement to first token.",
            queries=quantiles("headrace_ttft_prediction_error_seconds"),
            unit="s",
        ),
        Panel(
            title="Mean error beside the mean time to first token",
            about="Predictions are worth something while the error is far below the time itself.",
            queries=(
                Query(mean("headrace_ttft_prediction_error_seconds"), "error"),
                Query(mean("headrace_ttft_seconds"), "time to first token"),
            ),
            unit="s",
        ),
        Panel(
            title="Placements",
            about="Legs placed by the policy, and those that the shadow policy would have placed elsewhere.",
            queries=(
                Query(rate("headrace_placements_total", by="policy"), "{{policy}}"),
                Query(rate("headrace_shadow_differs_total"), "shadow differs"),
            ),
            unit="ops",
        ),
        Panel(
            title="Regret of the shadow policy",
            about="Predicted seconds a second that following the shadow policy would cost.",
            queries=(Query(rate("headrace_shadow_regret_seconds_total"), "regret"),),
        ),
        Panel(
            title="Accepted drafts",
            about="Share of the drafted tokens that became part of an answer.",
            queries=(
                Query(
                    f"{rate('headrace_accepted_tokens_total')} / {rate('headrace_drafted_tokens_total')}",
                    "accepted",
                ),
            ),
            unit="percentunit",
        ),
    ),
)

WORKERS = Row(
    "Workers",
    (
        Panel(
            title="Workers by state",
            about="A worker counts once for each router that knows it.",
            queries=(Query(value("headrace_workers", by="state"), "{{state}}"),),
            stacked=True,
        ),
        Panel(
            title="Requests in batches",
            about="Requests in the batch of each worker.",
            queries=(
                Query(f"max by (worker) (headrace_worker_running{{{OF_MODEL}}})", "{{worker}}"),
            ),
        ),
        Panel(
            title="Requests that wait inside workers",
            about="Requests that a worker has and does not compute yet.",
            queries=(
                Query(f"max by (worker) (headrace_worker_waiting{{{OF_MODEL}}})", "{{worker}}"),
            ),
        ),
        Panel(
            title="Last step",
            about="Duration of the last step of each worker.",
            queries=(
                Query(
                    f"max by (worker) (headrace_worker_step_seconds{{{OF_MODEL}}})", "{{worker}}"
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Steps, p99",
            about="Duration of the steps of each worker.",
            queries=(
                Query(
                    quantile(0.99, "headrace_worker_step_duration_seconds", OF_MODEL, by="worker"),
                    "{{worker}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Time to first token by worker, p95",
            about="From the placement of a leg to the first token of its worker.",
            queries=(
                Query(
                    quantile(0.95, "headrace_worker_ttft_seconds", OF_MODEL, by="worker"),
                    "{{worker}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Inter-token latency by worker, p95",
            about="From step to step of one answer.",
            queries=(
                Query(
                    quantile(0.95, "headrace_worker_itl_seconds", OF_MODEL, by="worker"),
                    "{{worker}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Tokens by worker",
            about="Tokens that each worker generated for these routers. Workers beyond 256 are together in `other`.",
            queries=(
                Query(
                    rate("headrace_worker_output_tokens_total", OF_MODEL, by="worker"), "{{worker}}"
                ),
            ),
            stacked=True,
        ),
        Panel(
            title="Prompt tokens by worker",
            about="Prompt tokens that each worker computed, whoever sent them.",
            queries=(
                Query(
                    f"max by (worker) (rate(headrace_worker_prompt_tokens_total{{{OF_MODEL}}}[{RATE}]))",
                    "{{worker}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            title="Preemptions",
            about="Times that a worker took the blocks of a running request: its pool is too small for what it runs.",
            queries=(
                Query(
                    f"max by (worker) (rate(headrace_worker_preemptions_total{{{OF_MODEL}}}[{RATE}]))",
                    "{{worker}}",
                ),
            ),
            unit="ops",
        ),
        Panel(
            title="Silence",
            about="Time since the last frame of each worker.",
            queries=(
                Query(
                    f"max by (worker) (headrace_worker_heartbeat_age_seconds{{{OF_MODEL}}})",
                    "{{worker}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Prompt tokens to come",
            about="Prompt tokens that a worker has still to compute, and those that come from other workers.",
            queries=(
                Query(
                    f"max by (worker) (headrace_worker_backlog_tokens{{{OF_MODEL}}})",
                    "{{worker}} to compute",
                ),
                Query(
                    f"max by (worker) (headrace_worker_arriving_tokens{{{OF_MODEL}}})",
                    "{{worker}} to pull",
                ),
            ),
        ),
    ),
)

ERRORS = Row(
    "Errors",
    (
        Panel(
            title="Broken streams",
            about="Streams that had begun and ended with an error event, by the error's kind.",
            queries=(Query(rate("headrace_streams_broken_total", by="reason"), "{{reason}}"),),
            unit="ops",
        ),
        Panel(
            title="Legs by outcome",
            about="How the parts of requests on one worker each ended.",
            queries=(Query(rate("headrace_legs_total", by="outcome"), "{{outcome}}"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            title="Failover",
            about="Legs placed again before their first token, answers that went on elsewhere, prompts computed again.",
            queries=(
                Query(rate("headrace_retries_total"), "retries"),
                Query(rate("headrace_resumes_total"), "resumes"),
                Query(rate("headrace_prefills_lost_total"), "prefills lost"),
            ),
            unit="ops",
        ),
        Panel(
            title="Gap of answers that went on elsewhere",
            about="From the loss of a worker to the next token of an answer.",
            queries=quantiles("headrace_resume_seconds"),
            unit="s",
        ),
        Panel(
            title="Cancelled and stalled",
            about="Legs that were cancelled, by stage, and clients that took nothing of their answers.",
            queries=(
                Query(rate("headrace_cancels_total", by="stage"), "{{stage}}"),
                Query(rate("headrace_stalls_total"), "stalled"),
                Query(rate("headrace_http_connections_stalled_total"), "connections cut"),
                Query(rate("headrace_http_answers_stalled_total"), "HTTP/2 answers cut"),
            ),
            unit="ops",
        ),
        Panel(
            title="Links of workers",
            about="Workers that joined or missed heartbeats, groups that were lost, and links that broke, by reason.",
            queries=(
                Query(rate("headrace_links_total"), "joined"),
                Query(rate("headrace_suspects_total"), "suspect"),
                Query(rate("headrace_groups_lost_total"), "groups lost"),
                Query(rate("headrace_link_errors_total", by="reason"), "{{reason}}"),
            ),
            unit="ops",
        ),
        Panel(
            title="Drains",
            about="Workers that left on purpose, by whether they did so in time.",
            queries=(Query(rate("headrace_drains_total", by="outcome"), "{{outcome}}"),),
            unit="ops",
        ),
    ),
)

DEGRADED = Row(
    "Degraded modes",
    (
        Panel(
            title="Not believed",
            about="Workers whose word about their blocks or their speed does not count.",
            queries=(
                Query(f"count(headrace_worker_credit{{{OF_MODEL}}} == 0) or vector(0)", "cache"),
                Query(
                    f"count(headrace_worker_speed_doubted{{{OF_MODEL}}} == 1) or vector(0)", "speed"
                ),
            ),
        ),
        Panel(
            title="Held off and incomplete",
            about="Workers that come and go too often, and groups that lack a rank.",
            queries=(
                Query(value("headrace_circuits_open"), "held off"),
                Query(f"count(headrace_group_whole{{{OF_MODEL}}} == 0) or vector(0)", "groups"),
            ),
        ),
        Panel(
            title="Block index made anew",
            about="Times that it was not known any more which blocks a worker holds, and events that changed nothing.",
            queries=(
                Query(rate("headrace_blocks_lost_total", by="reason"), "lost: {{reason}}"),
                Query(
                    rate("headrace_block_events_ignored_total", by="reason"), "ignored: {{reason}}"
                ),
                Query(rate("headrace_resyncs_total"), "snapshots"),
            ),
            unit="ops",
        ),
        Panel(
            title="Configuration that cannot be used",
            about="Wrong files of keys or certificates, failures to register in etcd, long texts that cannot be cut.",
            queries=(
                Query(value("headrace_reloads_refused"), "kinds of files"),
                Query(rate("headrace_discovery_errors_total", by="reason"), "etcd: {{reason}}"),
                Query(f"max by (model) (headrace_prompt_uncut{{{OF_MODEL}}})", "uncut: {{model}}"),
            ),
        ),
        Panel(
            title="Lost lines, spans and responses",
            about="Lines of the log, decisions, spans and stored responses that were not written.",
            queries=(
                Query(rate("headrace_log_lines_dropped_total", by="why"), "log: {{why}}"),
                Query(rate("headrace_decision_log_dropped_total"), "decisions dropped"),
                Query(rate("headrace_decision_log_errors_total"), "decision log errors"),
                Query(rate("headrace_spans_dropped_total", by="reason"), "spans: {{reason}}"),
                Query(rate("headrace_responses_not_stored_total"), "responses not stored"),
                Query(rate("headrace_response_store_errors_total"), "response store errors"),
            ),
            unit="ops",
        ),
    ),
)

SCALING = Row(
    "Scaling",
    (
        Panel(
            title="Workers that are needed",
            about="What it takes to keep the limits by the router's word, beside the workers that take requests.",
            queries=(
                Query(
                    f"max by (model, role) (headrace_scale_needed_workers{{{OF_MODEL}}})",
                    "needed {{model}} {{role}}",
                ),
                Query(
                    f"max by (model, role) (headrace_scale_workers{{{OF_MODEL}}})",
                    "there {{model}} {{role}}",
                ),
            ),
        ),
        Panel(
            title="Predicted wait for a worker's turn",
            about="Of nine in ten prompts, at most, with the workers that there are.",
            queries=(
                Query(
                    f"max by (model, role) (headrace_scale_predicted_queue_seconds{{{OF_MODEL}}})",
                    "{{model}} {{role}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Predicted utilisation",
            about="Share of their time that workers spend on prompts and answers.",
            queries=(
                Query(
                    f"max by (model, role) (headrace_scale_utilisation{{{OF_MODEL}}})",
                    "{{model}} {{role}}",
                ),
            ),
            unit="percentunit",
        ),
    ),
)

ROUTERS = Row(
    "Router",
    (
        Panel(
            title="Memory",
            about="Resident memory of each router.",
            queries=(
                Query(
                    f"max by (instance) (process_resident_memory_bytes{{{ROUTER}}})", "{{instance}}"
                ),
            ),
            unit="bytes",
        ),
        Panel(
            title="CPU",
            about="Cores that each router keeps busy.",
            queries=(Query(rate("process_cpu_seconds_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Tasks and bookings",
            about="Both go back to where they were when requests end.",
            queries=(
                Query(value("headrace_tasks"), "tasks"),
                Query(value("headrace_booked_legs"), "booked legs"),
            ),
        ),
        Panel(
            title="Memory charged to requests",
            about="Bodies until they are tokenised, answers until they are sent, requests that wait, stored responses.",
            queries=(
                Query(value("headrace_http_body_bytes"), "bodies"),
                Query(value("headrace_http_answer_bytes"), "answers"),
                Query(value("headrace_http_unread_bytes"), "unread"),
                Query(value("headrace_queue_bytes"), "queue"),
                Query(value("headrace_responses_stored_bytes"), "stored responses"),
                Query(value("headrace_prompt_cache_bytes"), "tokenised beginnings"),
                Query(value("headrace_chain_memo_bytes"), "block hashes of beginnings"),
                Query(value("headrace_description_bytes"), "descriptions of models"),
            ),
            unit="bytes",
            stacked=True,
        ),
        Panel(
            title="File descriptors",
            about="Open files, and how many there may be.",
            queries=(
                Query(value("process_open_fds"), "open"),
                Query(value("process_max_fds"), "limit"),
            ),
        ),
        Panel(
            title="Tokeniser",
            about="Prompts that wait for a thread, and the share of the text that was tokenised before.",
            queries=(
                Query(value("headrace_tokenizer_queue_requests"), "waiting"),
                Query(
                    f"{rate('headrace_prompt_cache_hits_total', OF_MODEL)}"
                    f" / ({rate('headrace_prompt_cache_hits_total', OF_MODEL)}"
                    f" + {rate('headrace_prompt_cache_misses_total', OF_MODEL)})",
                    "hits",
                ),
            ),
        ),
    ),
)

GROUPS = Row(
    "Groups of ranks, grammars",
    (
        Panel(
            title="Ranks",
            about="Ranks of each group that have a link.",
            queries=(Query(f"max by (group) (headrace_group_ranks{{{OF_MODEL}}})", "{{group}}"),),
        ),
        Panel(
            title="Uneven ranks",
            about="(max - mean) / mean of the ranks' own work in a step, and the share of the time that ranks wait.",
            queries=(
                Query(f"max by (group) (headrace_group_step_skew{{{OF_MODEL}}})", "{{group}} skew"),
                Query(
                    f"max by (group) (headrace_group_waited_share{{{OF_MODEL}}})",
                    "{{group}} waited",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Tokens by rank",
            about="Tokens that each rank generated.",
            queries=(Query(rate("headrace_rank_tokens_total", by="worker"), "{{worker}}"),),
        ),
        Panel(
            title="Late masks",
            about="Steps that waited for the masks of their grammars.",
            queries=(
                Query(
                    rate("headrace_worker_grammar_late_steps_total", OF_MODEL, by="worker"),
                    "{{worker}}",
                ),
            ),
            unit="ops",
        ),
        Panel(
            title="Grammars put off",
            about="Answers without a token in a step, as their masks were too much work; grammars not compiled.",
            queries=(
                Query(
                    rate("headrace_worker_grammar_put_off_total", OF_MODEL, by="worker"),
                    "{{worker}} put off",
                ),
                Query(
                    rate("headrace_worker_grammar_refused_total", OF_MODEL, by="worker"),
                    "{{worker}} refused",
                ),
                Query(rate("headrace_grammar_turned_away_total"), "turned away"),
            ),
            unit="ops",
        ),
        Panel(
            title="Memory of grammars",
            about="What the grammars of a worker and the answers that follow them hold.",
            queries=(
                Query(
                    f"max by (worker) (headrace_worker_grammar_memory_bytes{{{OF_MODEL}}})",
                    "{{worker}}",
                ),
            ),
            unit="bytes",
        ),
        Panel(
            title="Checks of grammars",
            about="Time to compile a grammar that was not known.",
            queries=quantiles("headrace_grammar_check_seconds"),
            unit="s",
        ),
    ),
    collapsed=True,
)
