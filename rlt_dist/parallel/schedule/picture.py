"""A timeline as one SVG picture: a row a stage, a box a piece of work, idle time left white."""

from collections.abc import Iterator

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
_ROW, _GAP, _LEFT, _TOP, _WIDTH = 26, 4, 64, 34, 1400
_LETTER = 6
"""Width of a figure inside a box; narrower boxes have no number."""
_KEY = 150


def picture(timeline: Timeline, title: str, unit: str) -> str:
    """The text of an SVG file.

    Args:
        timeline: of a simulation, or what the executor recorded.
        title: stands above.
        unit: of the timeline's times, as it is to be read: "ticks", "s".
    """
    start = min((t.start for stage in timeline for t in stage), default=0.0)
    end = max((t.end for stage in timeline for t in stage), default=0.0)
    scale = _WIDTH / ((end - start) or 1.0)
    bottom = _TOP + len(timeline) * (_ROW + _GAP)
    kinds = [kind for kind in Kind if any(kind == k for k, *_ in _drawn(timeline))]
    lines = -(-len(kinds) * _KEY // _WIDTH)
    body = [
        _text(_LEFT, 20, title, 'font-weight="bold"'),
        *_rows(timeline, start, scale),
        _text(_LEFT, bottom + 14, "0"),
        _text(_LEFT + _WIDTH, bottom + 14, f"{end - start:.4g} {unit}", 'text-anchor="end"'),
        *_key(kinds, bottom + 34),
    ]
    width, height = _LEFT + _WIDTH + 16, bottom + 34 + 20 * lines
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


def _drawn(timeline: Timeline) -> Iterator[tuple[Kind, int, Work, float, float]]:
    """Kind, stage, work, start and end of all that takes time."""
    for stage, timed in enumerate(timeline):
        for what, start, end in timed:
            if isinstance(what, Work) and end > start:
                yield what.kind, stage, what, start, end


def _rows(timeline: Timeline, origin: float, scale: float) -> Iterator[str]:
    for stage in range(len(timeline)):
        y = _TOP + stage * (_ROW + _GAP)
        yield _text(8, y + 17, f"stage {stage}")
        yield f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#f4f4f4"/>'
    for kind, stage, work, start, end in _drawn(timeline):
        x, y = _LEFT + (start - origin) * scale, _TOP + stage * (_ROW + _GAP)
        width = (end - start) * scale
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" '
            f'fill="{_COLOURS[kind]}"{_border(width)}>'
            f"<title>{work}, {end - start:.4g}</title></rect>"
        )
        if width > _LETTER * (len(str(work.micro)) + 1):
            yield _text(x + width / 2, y + 17, str(work.micro), 'text-anchor="middle"')


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
