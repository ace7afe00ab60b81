"""The order of instructions on real ranks: `python orders.py FOLDER`.

FOLDER/cases.json is a list of configurations; each rank writes FOLDER/STAGE.json: by case, what it
carried out.
"""

import json
import sys
from pathlib import Path

from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.train.rehearsal import Rehearsal

VOCABULARY, ENDLESS = 41, 1 << 60


def main(folder: Path) -> None:
    found = []
    with open_world() as world:
        for content in json.loads((folder / "cases.json").read_text()):
            config = RunConfig.model_validate(content)
            with mesh_of(config, world) as mesh:
                passed = Rehearsal(config, VOCABULARY, mesh, document=ENDLESS).pass_through()
                found.append([str(timed.instruction) for timed in passed.done])
        (folder / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
