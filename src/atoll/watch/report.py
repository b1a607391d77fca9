"""report.html: a run in one file that needs no network, readable on a wide and on a narrow screen, light and dark."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from atoll.core.config import DATA_PARALLEL
from atoll.store.evals import EvalLine
from atoll.watch.charts import LEGEND_PX, Charts, loss_title, or_nothing, page_figure, wrapped
from atoll.watch.judge import advice
from atoll.watch.status import status
from atoll.watch.story import duration, story
from atoll.watch.summary import piece_books, ratio, report_span_s, weighted_tokens
from atoll.watch.view import RunView

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1d2530; --soft: #5b6675; --line: #d9dfe7; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --ink: #e6eaf0; --soft: #9aa6b5; --line: #2c3542; --card: #1a2029; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 82rem; background: var(--page); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; } .soft { color: var(--soft); font-size: .9rem; }
.headline { font-size: 1.1rem; }
ul { margin: .25rem 0 1rem; padding-left: 1.2rem; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; align-items: start; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .9rem; min-width: 0; }
.wide { grid-column: 1 / -1; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
         overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; } .compared td, .compared th { min-width: 6.2rem; } td.when { white-space: nowrap; }
@media (max-width: 60rem) { .grid { grid-template-columns: minmax(0, 1fr); } body { padding: .8rem; } }
.js-plotly-plot .plotly .main-svg text { fill: var(--ink) !important; }
.js-plotly-plot .plotly .main-svg .heatmaplayer text { fill: #111111 !important; }
.js-plotly-plot .plotly .main-svg .hoverlayer text { fill: #ffffff !important; }
.js-plotly-plot .plotly .main-svg .gridlayer path { stroke: var(--line) !important; }
.js-plotly-plot .plotly .modebar { display: none; }
"""
BOOK = ("computed", "merged", "overwritten", "lost", "pending")


@dataclass(frozen=True, slots=True)
class Card:
    """One picture with its heading and a sentence on how to read it."""

    title: str
    text: str
    figure: go.Figure
    wide: bool = False


def report(view: RunView, evals: Sequence[EvalLine] = (), eval_loss: float | None = None) -> str:
    """The page of one run."""
    told = story(view, eval_loss)
    parts = [f'<p class="headline">{text(told.headline)}</p>', items(told.learners)]
    charts = Charts(view, evals)
    if view.mode == DATA_PARALLEL:
        shown = "".join(map(card, loss_cards(charts)))
    else:
        parts += ["<h2>What to change</h2>", items([finding.text for finding in advice(view)])]
        shown = "".join(map(card, run_cards(charts))) + tables(view)
    return page(f"Atoll: {view.run_id or 'run'}", f'{"".join(parts)}<div class="grid">{shown}</div>')


def loss_cards(charts: Charts) -> list[Card]:
    """Of a run of any mode."""
    return [
        Card("Loss over tokens", charts.loss_caption, charts.loss("tokens")),
        Card("Loss over time", "The same against the clock.", charts.loss("time")),
    ]


def run_cards(charts: Charts) -> list[Card]:
    """In the order of reading."""
    return [
        Card(
            "Learners",
            "Each row is a learner; a cross marks where it was lost. Ticks below: slots that closed.",
            charts.timeline(),
            wide=True,
        ),
        *loss_cards(charts),
        Card(
            "Loss of each learner",
            "One that stays apart from the others has other data, another rate, or counts its loss another way.",
            charts.learners_loss(),
        ),
        Card(
            "Participation",
            "Of the slots of a fragment that a learner was ready for, the share into which it was merged, in per cent.",
            charts.participation(),
        ),
        Card(
            "Contributions",
            "What became of them: a learner sends one per slot, of any length, and one per fragment at the end.",
            charts.fates(),
        ),
        Card(
            "Waits",
            "Where the time of a slot went, from the first learner that was there. Learners train on meanwhile.",
            charts.waits(),
        ),
        Card("Bandwidth", "Payload in and out of the syncer, without headers and retries.", charts.bandwidth()),
        Card(
            "Directions",
            "Mean over a round. 1: the same direction; 0: nothing in common; below 0: against.",
            charts.directions(),
        ),
        Card(
            "Lengths",
            "Mean over a round: how long merged deltas are, and the outer steps that they became.",
            charts.norms(),
        ),
    ]


@dataclass(frozen=True, slots=True)
class Compared:
    """One run of several on a page."""

    name: str
    view: RunView
    evals: Sequence[EvalLine] = ()
    eval_loss: float | None = None
    """Of the final model."""


def compare(runs: Sequence[Compared]) -> str:
    """The page of several runs, overlaid."""
    cards = [
        Card("Loss over tokens", _captions(runs), _overlaid(runs, "tokens"), wide=True),
        Card("Loss over time", f"The same against the clock{_since(runs)}.", _overlaid(runs, "time"), wide=True),
    ]
    return page("Atoll: runs compared", f'<div class="grid">{comparison(runs)}{"".join(map(card, cards))}</div>')


def _since(runs: Sequence[Compared]) -> str:
    """From when, where that differs."""
    parallel = {run.view.mode == DATA_PARALLEL for run in runs}
    told = f", which starts with the syncer and in {DATA_PARALLEL} with the first step"
    return told if len(parallel) > 1 else ""


def _captions(runs: Sequence[Compared]) -> str:
    return "Training loss; markers: held-out." if any(run.evals for run in runs) else "Training loss."


def _overlaid(runs: Sequence[Compared], over: str) -> go.Figure:
    figure = page_figure(420 + LEGEND_PX * len(runs))
    for run in runs:
        single = Charts(run.view, run.evals).loss(over)
        for trace, how in zip(single.data, ("training", "held-out"), strict=False):
            figure.add_scatter(x=trace.x, y=trace.y, mode=trace.mode, name=wrapped(f"{run.name}, {how}"))
        figure.update_xaxes(title=single.layout.xaxis.title.text)
    return figure.update_yaxes(title=loss_title(_unit(runs))).update_layout(showlegend=True)


def _unit(runs: Sequence[Compared]) -> str:
    """Of the losses, where it is the same in all of them."""
    units = {run.view.loss_unit for run in runs}
    return units.pop() if len(units) == 1 else ""


def comparison(runs: Sequence[Compared]) -> str:
    """One column of figures per run."""
    columns = [_figures(run) for run in runs]
    rows = [f"<tr><th></th>{''.join(f'<th>{text(run.name)}</th>' for run in runs)}</tr>"]
    names = ("mode", "learners", "slots", "time", "tokens", "tokens/s", "merged", "participation")
    for name, cells in zip((*names, loss_title(_unit(runs))), zip(*columns, strict=True), strict=True):
        rows.append(f"<tr><th>{text(name)}</th>{''.join(f'<td>{text(cell)}</td>' for cell in cells)}</tr>")
    return f'<div class="card wide scroll"><table class="compared">{"".join(rows)}</table></div>'


def _figures(run: Compared) -> tuple[str, ...]:
    """One run's cells, from top to bottom."""
    view, now = run.view, status(run.view)
    computed = weighted_tokens(view, piece_books(view))
    rate = ratio(now.tokens, report_span_s(view))
    held_out = run.evals[-1].loss if run.eval_loss is None and run.evals else run.eval_loss
    training = f"{now.loss:.4f} training" if now.loss else "-"
    return (
        now.mode,
        str(view.learners),
        f"{now.slot} of {now.slots}" if now.slots else "-",
        f"{now.elapsed_s:.0f} s",
        f"{now.tokens:,}",
        "-" if rate is None else f"{rate:,.0f}",
        f"{computed['merged'] / computed['computed']:.1%}" if computed["computed"] else "-",
        f"{now.participation:.3f}" if now.participation is not None else "-",
        f"{held_out:.4f} held-out" if held_out is not None else training,
    )


# ------------------------------------------------------------ html


def text(value: object) -> str:
    """Escaped."""
    return html.escape(str(value))


def items(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>" if lines else ""


def table_row(cells: Sequence[object], cell: str = "td") -> str:
    return "<tr>" + "".join(f"<{cell}>{text(value)}</{cell}>" for value in cells) + "</tr>"


def card(shown: Card) -> str:
    """A picture in its frame."""
    body = or_nothing(shown.figure).to_html(
        full_html=False, include_plotlyjs=False, config={"responsive": True, "displayModeBar": False}
    )
    wide = " wide" if shown.wide else ""
    heading = f'<h2>{text(shown.title)}</h2><p class="soft">{text(shown.text)}</p>'
    return f'<section class="card{wide}">{heading}{body}</section>'


def tables(view: RunView) -> str:
    """The ledger, what people were told, settings and versions."""
    tokens = weighted_tokens(view, piece_books(view))
    whole = tokens["computed"] or 1
    ledger = "".join(table_row((name, f"{tokens[name]:,.0f}", f"{tokens[name] / whole:.2%}")) for name in BOOK)
    settings = "".join(table_row(setting(*pair)) for pair in sorted(view.run.settings.items())) if view.run else ""
    versions = "".join(table_row(pair) for pair in sorted(view.run.versions.items())) if view.run else ""
    start_ns = view.first_ns or 0
    notices = "".join(
        f'<tr><td class="when">{(at_ns - start_ns) / 1e9:.1f} s</td><td>{text(said)}</td></tr>'
        for at_ns, said in view.history.notices
    )
    cards = [
        ("Fate of all tokens", ledger),
        ("Notices", notices or table_row(("none",))),
        ("Settings", settings),
        ("Versions", versions),
    ]
    return "".join(
        f'<section class="card"><h2>{name}</h2><div class="scroll"><table>{rows}</table></div></section>'
        for name, rows in cards
    )


def setting(name: str, value: object) -> tuple[str, object]:
    """As people read it."""
    if name.endswith("_ns") and isinstance(value, int):
        return name.removesuffix("_ns"), duration(value / 1e9)
    if name == "quorum" and not value:
        return name, "half of the ready learners"
    return ("slots begin with so many learners" if name == "learners" else name), value


def page(title: str, body: str) -> str:
    """The whole file."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{text(title)}</h1>{body}</body></html>\n"
    )
