"""Pictures of a run as plotly figures, from its read model. Colours of text and grid are the page's (watch.report)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import fmean
from textwrap import wrap
from typing import TypeVar

import plotly.graph_objects as go

from atoll.core.config import PAYLOAD_BYTES
from atoll.store.evals import EvalLine
from atoll.watch.history import LONG_RUN_NS, SlotRow, Span
from atoll.watch.story import slow_learners
from atoll.watch.view import RunView
from atoll.watch.window import agreement

Row = TypeVar("Row")
LABEL_MOST, WRAP_AT = 18, 28
"""Characters of a learner's name on an axis, and of a line of a legend: a page may be 420 pixels wide."""
POINTS_MAX = 300
FRAGMENTS_WITH_NUMBERS = 12
LEARNERS_NAMED = 12
"""More do not fit beside a picture; the pointer names them."""
STATES = {
    "ready": ("training", "#2a9d8f"),
    "idle": ("standing still", "#e9c46a"),
    "joining": ("joining", "#4895ef"),
    "away": ("lost, until it was back", "#e63946"),
    "gone": ("lost for good", "#6a040f"),
}
COLOURS = ("#4895ef", "#f4a261", "#2a9d8f", "#b56fd8", "#e63946", "#8d99ae", "#e9c46a", "#06d6a0")
ROW_PX, BASE_PX, LEGEND_PX = 30, 150, 20


def page_figure(height: int = 340, **layout: object) -> go.Figure:
    """An empty figure that fits the page."""
    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 12, "r": 12, "t": 12, "b": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hovermode="closest",
        colorway=list(COLOURS),
        **layout,
    )
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False, ticklabelstandoff=6)
    return figure


def or_nothing(figure: go.Figure) -> go.Figure:
    """A picture without a line says so."""
    if not figure.data:
        figure.add_annotation(text="nothing recorded", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
        figure.update_xaxes(visible=False).update_yaxes(visible=False)
    return figure


class Charts:
    """All figures of one run. Times are seconds, or minutes for long runs, since its first line."""

    def __init__(self, view: RunView, evals: Sequence[EvalLine] = ()) -> None:
        self.view = view
        self.evals = evals
        self._start_ns = view.first_ns or 0
        long = view.last_ns is not None and view.last_ns - self._start_ns >= LONG_RUN_NS
        self._unit_ns, self._unit = (60e9, "minutes") if long else (1e9, "seconds")
        self._rows = [r for s, r in sorted(view.history.slots.items()) if r.settled_ns and view.regular(s)]

    def _at(self, ns: float) -> float:
        return (ns - self._start_ns) / self._unit_ns

    def _time_axis(self, figure: go.Figure) -> go.Figure:
        figure.update_xaxes(title=f"{self._unit} into the run", rangemode="tozero")
        return figure

    # ------------------------------------------------------------ loss

    @property
    def loss_caption(self) -> str:
        """How to read `loss`."""
        shown = "; markers: the merged model on held-out text" if self.evals else ""
        return f"Mean over the steps of all learners{shown}."

    def loss(self, over: str) -> go.Figure:
        """Training loss and evaluations. over: tokens | time."""
        figure = page_figure()
        points = self.view.history.losses()
        xs = [tokens if over == "tokens" else self._at(ns) for ns, tokens, _ in points]
        figure.add_scatter(x=xs, y=[loss for *_, loss in points], name="training, mean of all", mode="lines")
        found = [(x, line.loss) for line in self.evals if (x := self._eval_x(line, over)) is not None]
        if found:
            figure.add_scatter(x=[x for x, _ in found], y=[y for _, y in found], name="held-out", mode="lines+markers")
        figure.update_yaxes(title=loss_title(self.view.loss_unit))
        if over == "time":
            return self._time_axis(figure)
        return figure.update_xaxes(title="tokens computed", rangemode="tozero")

    def learners_loss(self) -> go.Figure:
        """Training loss of each learner."""
        curves = {name: curve.means() for name, curve in sorted(self.view.history.curves.items())}
        named, told = len(curves) <= LEARNERS_NAMED, labels(curves)
        figure = page_figure(340 + (LEGEND_PX * len(curves) // 2 if named else 0), showlegend=named)
        for name, points in curves.items():
            if points:
                xs, ys = [self._at(ns) for ns, *_ in points], [loss for *_, loss in points]
                figure.add_scatter(x=xs, y=ys, name=told[name], mode="lines", line={"width": 1.5})
        figure.update_yaxes(title=loss_title(self.view.loss_unit))
        return self._time_axis(figure)

    def _eval_x(self, line: EvalLine, over: str) -> float | None:
        """Where its slot stands; the end for a slot of the finish."""
        row = self.view.history.slots.get(line.slot)
        if row is None or not row.published_ns:
            return None
        if over == "time":
            return self._at(row.published_ns)
        history = self.view.history
        before = [t for ns, t in zip(history.loss_ns, history.loss_tokens, strict=True) if ns <= row.published_ns]
        return float(before[-1]) if before else None

    # ------------------------------------------------------------ learners

    def timeline(self) -> go.Figure:
        """A row per learner with its states, and the slots below."""
        names = sorted(self.view.history.spans)
        figure = page_figure(BASE_PX + ROW_PX * (len(names) + 1), barmode="overlay", bargap=0.3)
        for state, (said, colour) in STATES.items():
            spans = [(name, span) for name in names for span in self._spans(name) if span.state == state]
            if spans:
                figure.add_bar(
                    orientation="h",
                    y=[name for name, _ in spans],
                    base=[self._at(span.start_ns) for _, span in spans],
                    x=[(self._stop(span) - span.start_ns) / self._unit_ns for _, span in spans],
                    name=said,
                    marker={"color": colour, "line": {"width": 0}},
                    customdata=[span.reason for _, span in spans],
                    hovertemplate="%{y}: " + said + " (%{customdata})<br>from %{base:.1f} for %{x:.1f} " + self._unit,
                )
        self._mark_losses(figure, names)
        rows = thinned(self._rows, POINTS_MAX)
        figure.add_scatter(
            x=[self._at(row.closed_ns) for row in rows],
            y=["slots"] * len(rows),
            mode="markers",
            name="slot closed",
            marker={"symbol": "line-ns-open", "size": 11, "color": "#8d99ae"},
            customdata=[[row.slot, row.piece, len(row.merged), row.ready] for row in rows],
            hovertemplate="slot %{customdata[0]}, fragment %{customdata[1]}: "
            "%{customdata[2]} of %{customdata[3]} merged",
        )
        rows_down = ["slots", *reversed(names)]
        figure.update_yaxes(categoryorder="array", categoryarray=rows_down, type="category")
        slow = slow_learners(self.view)
        told = labels(rows_down)
        said = [told[n] + (f"<br>(steps take {slow[n][0]:.1f}x)" if n in slow else "") for n in rows_down]
        figure.update_yaxes(tickvals=rows_down, ticktext=said)
        return self._time_axis(figure)

    def _spans(self, name: str) -> list[Span]:
        """A learner between two lives is away."""
        spans = self.view.history.spans[name]
        gone = self.view.history.absences(name, self.view.last_ns or 0)
        away = [
            Span("away" if one.back else "gone", one.start_ns, one.stop_ns, one.generation, one.reason) for one in gone
        ]
        return [span for span in spans if span.state not in ("away", "ended")] + away

    def _stop(self, span: Span) -> int:
        return span.stop_ns or self.view.last_ns or span.start_ns

    def _mark_losses(self, figure: go.Figure, names: Sequence[str]) -> None:
        last_ns = self.view.last_ns or 0
        lost = [(name, span) for name in names for span in self.view.history.absences(name, last_ns)]
        if lost:
            figure.add_scatter(
                x=[self._at(span.start_ns) for _, span in lost],
                y=[name for name, _ in lost],
                mode="markers",
                name="lost",
                marker={"symbol": "x", "size": 10, "color": "#9d0208", "line": {"width": 1, "color": "white"}},
                customdata=[span.reason for _, span in lost],
                hovertemplate="%{y} was lost: %{customdata}",
            )

    def participation(self) -> go.Figure:
        """Share of the slots of a fragment, at whose closing the learner was ready, into which it was merged."""
        pairs = self.view.history.pairs
        names, pieces = sorted({name for name, _ in pairs}), range(self.view.pieces)
        shares = [[pairs[name, p].mean if (name, p) in pairs else None for p in pieces] for name in names]
        figure = page_figure(BASE_PX + ROW_PX * len(names))
        figure.add_heatmap(
            z=shares,
            x=[str(p) for p in pieces],
            y=names,
            zmin=0,
            zmax=1,
            colorscale=[[0, "#e63946"], [0.5, "#f4a261"], [0.8, "#e9c46a"], [1, "#2a9d8f"]],
            text=[["" if share is None else f"{100 * share:.0f}" for share in row] for row in shares],
            texttemplate="%{text}" if len(pieces) <= FRAGMENTS_WITH_NUMBERS else "",
            textfont={"color": "#111111", "size": 12},
            colorbar={"tickformat": ".0%", "thickness": 12},
            hovertemplate="%{y}, fragment %{x}: %{z:.1%}<extra></extra>",
            xgap=2,
            ygap=2,
        )
        figure.update_xaxes(title="fragment", type="category", showgrid=False)
        return name_rows(figure.update_yaxes(autorange="reversed", showgrid=False), names)

    def fates(self) -> go.Figure:
        """What became of each learner's contributions, by reason."""
        counts: dict[str, Counter[str]] = {"merged": Counter()}
        for row in self.view.history.slots.values():
            counts["merged"].update(part.name for part in row.merged if row.published_ns)
        for (name, _, fate, reason), number in sorted(self.view.history.fates.items()):
            counts.setdefault(f"{fate}: {reason}", Counter())[name] += number
        names = sorted({name for name, _ in self.view.lives})
        told = {fate: wrapped(fate) for fate in counts}
        legend_px = LEGEND_PX * sum(1 + each.count("<br>") for each in told.values())
        figure = page_figure(BASE_PX + ROW_PX * len(names) + legend_px, barmode="stack", bargap=0.3)
        for index, (fate, found) in enumerate(counts.items()):
            colour = "#2a9d8f" if fate == "merged" else COLOURS[(index + 3) % len(COLOURS)]
            xs = [found[n] for n in names]
            figure.add_bar(orientation="h", y=names, x=xs, name=told[fate], marker={"color": colour})
        figure.update_layout(legend={"orientation": "v", "yanchor": "bottom", "y": 1.02, "x": 0}, showlegend=True)
        figure.update_yaxes(autorange="reversed")
        return name_rows(figure, names).update_xaxes(title="contributions")

    # ------------------------------------------------------------ slots

    def waits(self) -> go.Figure:
        """Where the time of a slot went."""
        figure = page_figure()
        for name, value in (
            ("quorum: for enough learners", lambda row: row.quorum_wait_ns),
            ("grace: for slower learners", lambda row: row.waited_ns),
            ("collecting bytes", lambda row: row.collect_ns),
            ("merging and writing", lambda row: row.settled_ns - row.closed_ns - row.collect_ns),
        ):
            xs, ys = self._binned(self._rows, lambda row, value=value: value(row) / 1e6)
            figure.add_scatter(x=xs, y=ys, name=name, mode="lines", stackgroup="waits", line={"width": 0})
        figure.update_yaxes(title="ms per slot", rangemode="tozero")
        return self._time_axis(figure)

    def bandwidth(self) -> go.Figure:
        """Payload of what was merged, and of updates for all that were ready: neither retries nor headers."""
        figure = page_figure()
        assert self.view.run is not None
        assert self.view.config is not None
        each = PAYLOAD_BYTES[self.view.config.payload]
        trained, buffers = self.view.run.piece_sizes, self.view.run.buffer_sizes or (0,) * self.view.pieces
        sizes = [size * each + more * PAYLOAD_BYTES["fp32"] for size, more in zip(trained, buffers, strict=True)]
        for name, dash, count in (
            ("contributions to the syncer", "solid", lambda row: len(row.merged)),
            ("updates to learners", "dot", lambda row: row.ready if row.merged else 0),
        ):
            xs, ys = self._per_second(lambda row, count=count: count(row) * sizes[row.piece])
            figure.add_scatter(x=xs, y=ys, name=name, mode="lines", line={"shape": "hv", "dash": dash})
        figure.update_yaxes(title="MB/s", rangemode="tozero")
        return self._time_axis(figure)

    def _per_second(self, value: Callable[[SlotRow], float]) -> tuple[list[float], list[float]]:
        xs, ys = [], []
        for before, chunk in chunks(self._rows, POINTS_MAX // 3):
            start_ns = before.closed_ns if before is not None else self.view.start_ns or self._start_ns
            spent_ns = chunk[-1].closed_ns - start_ns
            if spent_ns > 0:
                xs.append(self._at(start_ns))
                ys.append(sum(map(value, chunk)) / spent_ns * 1e3)
        return xs, ys

    def directions(self) -> go.Figure:
        """Cosines between learners, and of merged deltas with the momentum before."""
        merge = self.view.config.merge if self.view.config is not None else "rda"
        return self._over_rounds(
            "cosine",
            ("two learners in one slot", lambda row: agreement([row], merge)),
            (wrapped("a merged delta and the momentum before it"), lambda row: row.follows if row.merged else None),
        )

    def norms(self) -> go.Figure:
        """Lengths of merged deltas and of the steps that they became."""
        return self._over_rounds(
            "norm",
            ("merged delta", lambda row: row.delta_norm or None),
            ("outer step", lambda row: row.step_norm or None),
        ).update_yaxes(rangemode="tozero")

    def _over_rounds(self, title: str, *lines: tuple[str, Callable[[SlotRow], float | None]]) -> go.Figure:
        """Means over the newest round at each slot: pieces differ by their nature, and would swing once per round."""
        figure = page_figure()
        for name, value in lines:
            known = [(row, found) for row in self._rows if row.merged and (found := value(row)) is not None]
            means = running_means([found for _, found in known], self.view.pieces)
            points = thinned(list(zip((row.closed_ns for row, _ in known), means, strict=True)), POINTS_MAX)
            if points:
                xs, ys = [self._at(ns) for ns, _ in points], [y for _, y in points]
                figure.add_scatter(x=xs, y=ys, name=name, mode="lines")
        figure.update_yaxes(title=title)
        return self._time_axis(figure)

    def _binned(
        self, rows: Sequence[SlotRow], value: Callable[[SlotRow], float]
    ) -> tuple[list[float], list[float]]:
        """Means of at most so many bins of slots."""
        found = [(self._at(chunk[-1].closed_ns), fmean(map(value, chunk))) for _, chunk in chunks(rows, POINTS_MAX)]
        return [x for x, _ in found], [y for _, y in found]


def labels(names: Iterable[str]) -> dict[str, str]:
    """Of each name what fits beside a picture: long ones without their middle, as long as they stay apart."""
    all_names, most = list(names), LABEL_MOST
    while True:
        found = {name: _without_middle(name, most) for name in all_names}
        if len(set(found.values())) == len(found):
            return found
        most += 4


def _without_middle(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[most // 2 - most :]}"


def name_rows(figure: go.Figure, names: Sequence[str]) -> go.Figure:
    """A row for each name."""
    told = labels(names)
    return figure.update_yaxes(type="category", tickvals=list(names), ticktext=[told[name] for name in names])


def wrapped(text: str) -> str:
    """In lines that fit a legend."""
    return "<br>".join(wrap(text, WRAP_AT))


def loss_title(unit: str) -> str:
    """Of an axis or a column."""
    return f"loss ({unit})" if unit else "loss"


def chunks(rows: Sequence[SlotRow], count_max: int) -> list[tuple[SlotRow | None, Sequence[SlotRow]]]:
    """At most so many runs of neighbours, each with the row before it."""
    size = -(-len(rows) // count_max) or 1
    return [(rows[start - 1] if start else None, rows[start : start + size]) for start in range(0, len(rows), size)]


def running_means(values: Sequence[float], width: int) -> list[float]:
    """Of each value and the ones before it, `width` in all; fewer at the beginning."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(0, i - width)]) / min(i, width) for i in range(1, len(sums))]


def thinned(rows: Sequence[Row], count_max: int) -> Sequence[Row]:
    """At most so many, evenly spread."""
    return rows[:: -(-len(rows) // count_max) or 1]
