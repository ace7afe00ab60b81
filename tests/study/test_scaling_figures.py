"""Figures of scaling studies with many series and long names."""

from matplotlib.figure import Figure

from rlt_dist.study.scaling_figures import Bar, Curve, Drawing, efficiency, shares, throughput


def curves(number: int, name: str) -> list[Curve]:
    return [
        Curve(f"{name} {each}", {1: 1.0 + each, 4: 3.0 + each}, {1: 1.1 + each, 4: 3.1 + each})
        for each in range(number)
    ]


def assert_whole(drawing: Drawing) -> None:
    """The legend lies within the figure, and leaves the axes room."""
    figure: Figure = drawing.figure
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.x0 >= whole.x0
    assert box.x1 <= whole.x1
    assert box.y1 <= whole.y1 + 1
    inner = axes.get_window_extent()
    assert inner.y1 <= box.y0
    assert inner.width > 2 * figure.dpi
    assert inner.height > 0.2 * figure.dpi


def test_legends_are_whole_however_many_and_long_series_are() -> None:
    for number, name in ((2, "a"), (24, "model rlt2, cut tensor, feedback"), (9, "long" * 40)):
        for drawn in (throughput, efficiency):
            assert_whole(drawn(curves(number, name)))
    one = [Curve(each.name, {1: 1.0}, {}) for each in curves(9, "long" * 40)]
    assert_whole(throughput(one))
    parts = {"compute": 0.5, "bubble": 0.25, "tensor": 0.25}
    assert_whole(shares([Bar(f"{'long' * 40}={each}", "predicted", parts) for each in range(9)]))


def test_no_two_series_look_alike_and_linear_scaling_is_named() -> None:
    (legend,) = throughput(curves(20, "series")).figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[-3:] == ["measured", "predicted", "linear"]
    looks = {(line.get_color(), line.get_marker()) for line in legend.get_lines()[:20]}
    assert len(looks) == 20
