"""Chrome traces and pictures of timelines, planned or carried out."""

import json
from collections import defaultdict
from xml.etree import ElementTree

import pytest

from rlt_dist.parallel.schedule.chrome import chrome_trace
from rlt_dist.parallel.schedule.costs import TOKEN_BY_TOKEN, WHOLE_SEGMENTS, ticks
from rlt_dist.parallel.schedule.instructions import Send, Work
from rlt_dist.parallel.schedule.looped import looped
from rlt_dist.parallel.schedule.picture import picture
from rlt_dist.parallel.schedule.pipeline import one_f_one_b
from rlt_dist.parallel.schedule.simulate import simulate

TIMELINES = {
    "ring": simulate(looped(3, [(3, 2)] * 4), TOKEN_BY_TOKEN, 0.5),
    "ring in ticks": simulate(looped(3, [(3, 2)] * 4), ticks),
    "1F1B": simulate(one_f_one_b(4, 6), WHOLE_SEGMENTS),
    "one stage": simulate(one_f_one_b(1, 2), WHOLE_SEGMENTS),
}
each_timeline = pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES)


@each_timeline
def test_a_trace_has_every_piece_of_work_on_its_stages_process(timeline):
    events = json.loads(chrome_trace({"planned": timeline}, unit=1000.0))["traceEvents"]
    for stage, timed in enumerate(timeline):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == stage]
        wanted = [(str(t.instruction), t.start * 1000.0) for t in timed if t.end > t.start]
        assert [(e["name"], e["ts"]) for e in slices] == wanted
        times = [time for e in slices for time in (e["ts"], e["ts"] + e["dur"])]
        assert times == pytest.approx(sorted(times))
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {p: f"planned: stage {p} of {len(timeline)}" for p in range(len(timeline))}


@each_timeline
def test_a_trace_has_an_arrow_for_every_message_from_work_to_work(timeline):
    events = json.loads(chrome_trace({"planned": timeline}))["traceEvents"]
    arrows: dict[int, list] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
    sent = [
        t.instruction.message
        for stage in timeline
        for t in stage
        if isinstance(t.instruction, Send)
    ]
    assert len(arrows) == len(sent)
    works = [e for e in events if e["ph"] == "X" and e["cat"] != "messages"]
    for pair in arrows.values():
        start, finish = sorted(pair, key=lambda e: e["ph"], reverse=True)
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] < finish["ts"]
        for event in pair:
            around = [e for e in works if e["pid"] == event["pid"]]
            assert any(e["ts"] < event["ts"] < e["ts"] + e["dur"] for e in around)


@each_timeline
def test_a_picture_has_a_box_for_every_piece_of_work(timeline):
    root = ElementTree.fromstring(picture({"planned": timeline}, "m < P & more", "ticks"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [box.find(f"{space}title") for box in root.iter(f"{space}rect")]
    titles = [title.text.split(",")[0] for title in boxes if title is not None]
    worked = [t for stage in timeline for t in stage if isinstance(t.instruction, Work)]
    assert titles == [str(t.instruction) for t in worked if t.end > t.start]
    texts = {text.text for text in root.iter(f"{space}text")}
    assert {"m < P & more", *(f"stage {p}" for p in range(len(timeline)))} <= texts
    assert {str(t.instruction.kind) for t in worked if t.end > t.start} <= texts


def test_a_plan_and_its_run_share_one_axis_and_no_arrow():
    planned, run = TIMELINES["ring in ticks"], TIMELINES["ring"]
    events = json.loads(chrome_trace({"planned": planned, "run": run}))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names) == list(range(6))
    assert [name.split(":")[0] for name in names.values()] == ["planned"] * 3 + ["run"] * 3
    ends: dict[int, set[bool]] = defaultdict(set)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].add(event["pid"] < 3)
    assert all(len(of_plan) == 1 for of_plan in ends.values())

    root = ElementTree.fromstring(picture({"planned": planned, "run": run}, "both", "s"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [b for b in root.iter(f"{space}rect") if b.find(f"{space}title") is not None]
    right = max(float(box.get("x", 0)) + float(box.get("width", 0)) for box in boxes)
    rows = {box.get("y") for box in boxes}
    assert len(rows) == 6
    scale = {
        float(box.get("width", 0)) / (float(box.find(f"{space}title").text.split(", ")[1]))
        for box in boxes
        if float(box.get("width", 0)) > 20
    }
    assert max(scale) == pytest.approx(min(scale), rel=0.01)
    assert right == pytest.approx(64 + 1400, abs=0.1)
