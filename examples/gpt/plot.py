"""The loss curve, as a table and as a picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from gpt.training import History

SIZE = (960, 600)  # pixels
DPI = 120
COLUMNS = ("step", "seconds", "characters", "learning_rate", "training_loss", "validation_loss")
# Okabe and Ito's palette, told apart with the common kinds of colour blindness.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"


def write_table(path: Path, history: History) -> None:
    """Write the history as CSV, one row a reading, in the order of steps; an empty field where nothing was measured."""
    rows: dict[int, dict[str, Any]] = {}
    for step, seconds, characters, rate, loss in history.training:
        rows[step] = dict(zip(COLUMNS, (step, f"{seconds:.3f}", characters, f"{rate:.3e}", f"{loss:.6f}", ""), strict=True))
    for step, seconds, characters, loss in history.validation:
        row = rows.setdefault(step, dict(zip(COLUMNS, (step, f"{seconds:.3f}", characters, "", "", ""), strict=True)))
        row["validation_loss"] = f"{loss:.6f}"
    part = path.with_suffix(".csv.tmp")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[step] for step in sorted(rows))
    part.replace(path)


def write_picture(path: Path, history: History, baselines: dict[str, float], final: float, title: str) -> None:
    """Draw the losses over the characters seen, as a PNG of `SIZE` pixels.

    Args:
        path: the picture.
        history: a run.
        baselines: name to nats per character, drawn as level lines.
        final: validation loss over the whole validation part at the end.
        title: headline of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0] / DPI, SIZE[1] / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    thousands = [row[2] / 1000 for row in history.training]
    axes.plot(thousands, [row[4] for row in history.training], color=BLUE, alpha=0.75, linewidth=1.2, label="training")
    seen = [row[2] / 1000 for row in history.validation]
    axes.plot(seen, [row[3] for row in history.validation], "o-", color=ORANGE, linewidth=1.6, markersize=4.5,
              label="validation (sample)")  # fmt: skip
    last = max([*thousands, *seen, 0.001])
    for name, value in baselines.items():
        axes.axhline(value, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(f"{name}: {value:.2f}", (1, value), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                      textcoords="offset points", ha="right", va="bottom", color=GREY, fontsize=9)  # fmt: skip
    axes.plot([last], [final], "D", color=ORANGE, markersize=7, markeredgecolor="white", zorder=5,
              label=f"validation (all), at the end: {final:.3f}")  # fmt: skip
    axes.set_xlim(0, last * 1.02)
    # The first losses, of an untrained model, would squeeze everything else.
    highest = max([*baselines.values(), *(row[3] for row in history.validation), final])
    lowest = min([final, *baselines.values(), *(row[4] for row in history.training), *(row[3] for row in history.validation)])
    margin = 0.12 * (highest - lowest) + 0.02
    axes.set_ylim(lowest - margin, highest + 1.5 * margin)
    axes.set_xlabel("thousand characters seen")
    axes.set_ylabel("loss (nats per character)")
    bits = axes.secondary_yaxis("right", functions=(nats_to_bits, bits_to_nats))
    bits.set_ylabel("bits per character")
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.86))
    part = path.with_suffix(".png.tmp")
    figure.savefig(part, format="png")
    part.replace(path)


def nats_to_bits(value: Any) -> Any:
    return value / 0.6931471805599453


def bits_to_nats(value: Any) -> Any:
    return value * 0.6931471805599453
