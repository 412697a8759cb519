"""The reports of a routing run as a table for people."""

from collections.abc import Sequence
from typing import Any

Report = dict[str, Any]
HEAD = (
    f"{'ms':22}{'errors':>7}{'hits %':>8}{'mean':>10}{'p50':>10}{'p99':>10}{'/ round-robin':>15}"
    f"{'per token':>11}{'imbalance':>11}"
)


def table(reports: Sequence[Report]) -> str:
    """All figures, a block for each trace."""
    lines: list[str] = []
    for trace in dict.fromkeys(report["trace"] for report in reports):
        chosen = [report for report in reports if report["trace"] == trace]
        robin = {r["mode"]: r["ttft_ms"]["mean"] for r in chosen if r["policy"] == "round-robin"}
        first = chosen[0]
        bound = 100 * first["bound_hit_rate"]
        setting = f"{first['requests']} requests, util {first['util']:g}, bound {bound:.1f} %"
        lines += ["", f"{trace}: {setting}", HEAD]
        for report in chosen:
            ttft, mode = report["ttft_ms"], report["mode"]
            share = f"{ttft['mean'] / robin[mode]:.3f}" if mode in robin else "-"
            hits = 100 * (report["token_hit_rate"] or 0)
            imbalance = f"{report['imbalance']:.2f}" if report["imbalance"] else "-"
            lines.append(
                f"  {report['policy']:15}{mode:5}{report['errors']:>7}{hits:>8.1f}"
                f"{ttft['mean']:>10.0f}{ttft['p50']:>10.0f}{ttft['p99']:>10.0f}{share:>15}"
                f"{report['tpot_ms'] or 0:>11.1f}{imbalance:>11}"
            )
    return "\n".join([*lines, "", *agreement(reports)])


def agreement(reports: Sequence[Report]) -> list[str]:
    """How far live and simulated runs of the same requests are apart, at most."""
    by_run = {(r["trace"], r["policy"], r["mode"]): r for r in reports}
    ttft: list[tuple[float, str]] = []
    hits: list[tuple[float, str]] = []
    for (trace, policy, mode), live in by_run.items():
        sim = by_run.get((trace, policy, "sim"))
        if mode == "live" and sim is not None:
            run = f"{trace}, {policy}"
            ttft.append((abs(live["ttft_ms"]["mean"] / sim["ttft_ms"]["mean"] - 1), run))
            hits.append((abs((live["token_hit_rate"] or 0) - (sim["token_hit_rate"] or 0)), run))
    if not ttft:
        return []
    (far_ttft, ttft_run), (far_hits, hits_run) = max(ttft), max(hits)
    apart = f"mean first token {100 * far_ttft:.1f} % ({ttft_run}), "
    apart += f"hit rate {100 * far_hits:.1f} points ({hits_run})"
    return [f"live against sim, farthest apart: {apart}"]
