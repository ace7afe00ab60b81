"""Timelines as one SVG picture: a row a stage, a box a piece of work, idle time left white."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlt_dist.parallel.schedule.instructions import Kind, Work
from rlt_dist.parallel.schedule.simulate import Timeline

_COLOURS = {
    Kind.EMBED: "#9aa5b1",
    Kind.FORWARD: "#4c8fd6",
    Kind.ENCODE: "#4c8fd6",
    Kind.MEMORY: "#7fb8a4",
    Kind.DECODE: "#58b368",
    Kind.CARRY: "#9aa5b1",
    Kind.HEAD: "#f2c14e",
    Kind.BACKWARD: "#d9674e",
    Kind.REPLAY: "#a5d6a7",
    Kind.DECODE_BACKWARD: "#f0965a",
    Kind.MEMORY_GRADIENT: "#c9a27e",
    Kind.WEIGHTS: "#b08bc4",
    Kind.MEMORY_BACKWARD: "#a8786f",
    Kind.ENCODE_BACKWARD: "#d9674e",
    Kind.EMBED_BACKWARD: "#9aa5b1",
}
_ROW, _GAP, _GROUP, _LEFT, _TOP, _WIDTH = 26, 4, 20, 64, 26, 1400
_LETTER = 6
"""Width of a figure inside a box; narrower boxes have no number."""
_KEY = 150


def picture(timelines: Mapping[str, Timeline], title: str, unit: str) -> str:
    """The text of an SVG file.

    Args:
        timelines: by name, of a simulation or what the executor recorded; they stand one below the
            other, each from its own start, over one axis of time.
        title: stands above.
        unit: of the timelines' times, as it is to be read: "ticks", "s".
    """
    boxes = list(_boxes(timelines))
    length = max((box.end for box in boxes), default=0.0)
    bottom = _TOP + sum(len(timeline) * (_ROW + _GAP) + _GROUP for timeline in timelines.values())
    kinds = [kind for kind in Kind if any(kind == box.work.kind for box in boxes)]
    lines = -(-len(kinds) * _KEY // _WIDTH)
    scale = _WIDTH / (length or 1.0)
    body = [
        _text(_LEFT, 20, title, 'font-weight="bold"'),
        *_rows(timelines),
        *(line for box in boxes for line in _drawn(box, scale)),
        _text(_LEFT, bottom + 14, "0"),
        _text(_LEFT + _WIDTH, bottom + 14, f"{length:.4g} {unit}", 'text-anchor="end"'),
        *_key(kinds, bottom + 34),
    ]
    width, height = _LEFT + _WIDTH + 16, bottom + 34 + 20 * lines
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


class _Box(NamedTuple):
    """Work that takes time, from its timeline's start on; `y` is its row's."""

    work: Work
    start: float
    end: float
    y: int


def _lines(timelines: Mapping[str, Timeline]) -> Iterator[tuple[str, int, int]]:
    """Name, stage and y of every row."""
    y = _TOP
    for name, timeline in timelines.items():
        y += _GROUP
        for stage in range(len(timeline)):
            yield name, stage, y
            y += _ROW + _GAP


def _boxes(timelines: Mapping[str, Timeline]) -> Iterator[_Box]:
    origins = {
        name: min((t.start for stage in timeline for t in stage), default=0.0)
        for name, timeline in timelines.items()
    }
    for name, stage, y in _lines(timelines):
        for what, start, end in timelines[name][stage]:
            if isinstance(what, Work) and end > start:
                yield _Box(what, start - origins[name], end - origins[name], y)


def _rows(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    for name, stage, y in _lines(timelines):
        if stage == 0:
            yield _text(_LEFT, y - 6, name)
        yield _text(8, y + 17, f"stage {stage}")
        yield f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#f4f4f4"/>'


def _drawn(box: _Box, scale: float) -> Iterator[str]:
    x, width, work = _LEFT + box.start * scale, (box.end - box.start) * scale, box.work
    yield (
        f'<rect x="{x:.2f}" y="{box.y}" width="{width:.2f}" height="{_ROW}" '
        f'fill="{_COLOURS[work.kind]}"{_border(width)}>'
        f"<title>{work}, {box.end - box.start:.4g}</title></rect>"
    )
    if width > _LETTER * (len(str(work.micro)) + 1):
        yield _text(x + width / 2, box.y + 17, str(work.micro), 'text-anchor="middle"')


def _border(width: float) -> str:
    """A line between boxes, unless it would be all that is seen of them."""
    return ' stroke="white" stroke-width="0.5"' if width > 3 else ""


def _key(kinds: list[Kind], y: int) -> Iterator[str]:
    """What the colours say."""
    a_line = _WIDTH // _KEY
    for number, kind in enumerate(kinds):
        at_x, at_y = _LEFT + number % a_line * _KEY, y + number // a_line * 20
        fill = _COLOURS[kind]
        yield f'<rect x="{at_x}" y="{at_y - 10}" width="12" height="12" fill="{fill}"/>'
        yield _text(at_x + 18, at_y, kind)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.2f}" y="{y}" {more}>{text}</text>'
