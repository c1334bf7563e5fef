"""Grids on a cluster: of Ray, with a machine that is taken away, and of Slurm's stand-ins; parts of a grid."""

import socket
import threading

import pytest
import yaml
from made_faces import make_faces

from fairhead.bench import engines, runner
from fairhead.bench.engines import Workplace
from fairhead.bench.grid_file import read_grid
from fairhead.bench.results_folder import Store
from fairhead.bench.runner import run_grid
from fairhead.cli import main
from fairhead.errors import FairheadError, InputError

GRID = {
    "title": "Small",
    "data": [{"name": "faces", "read": "utkface:${FACES}", "group": "white", "split_by_seed": True}],
    "backbones": [
        {
            "name": "tiny",
            "model": "vit-1x2",
            "settings": {"width": 8, "mlp": 8, "image_size": 8, "patch_size": 4},
        }
    ],
    "methods": ["erm", "dam"],
    "seeds": [0, 1],
    "plan": {"epochs": 1, "batch_size": 64, "learning_rate": 0.01},
    "n_boot": 200,
}


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return make_faces(tmp_path_factory.mktemp("faces"))


@pytest.fixture
def grid_of(faces, tmp_path):
    def read(**changes):
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump({**GRID, **changes}))
        return read_grid(tmp_path / "grid.yaml", [], {"FACES": str(faces)})

    return read


def figures(out):
    """All that does not say how long it took."""
    store = Store(out)
    found = {}
    for row in store.rows():
        assert row["status"] == "done", row["error"]
        found[row["cell"]] = (row["figures"], row["history"], store.records(row).to_frame().to_dict())
    return found


def in_this_process(cells, workplace):
    """Spares the start of workers, where these are not what is tested."""
    for cell in cells:
        yield engines.work(cell, workplace, lambda news: None, lambda: 1)


def test_parts_of_a_grid_put_together_are_the_grid(grid_of, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_cells", in_this_process)
    grid = grid_of()
    assert run_grid(grid, tmp_path / "whole", Workplace()).done == 4
    for part in (1, 2):
        assert run_grid(grid, tmp_path / f"part{part}", Workplace(), shard=(part, 2)).done == 2
    store = Store(tmp_path / "both")
    assert [store.take_in(Store(tmp_path / f"part{part}")) for part in (1, 2)] == [2, 2]
    assert figures(tmp_path / "both") == figures(tmp_path / "whole")
    assert run_grid(grid, tmp_path / "both", Workplace()) == (4, 0, 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--shard", "3/2"], "--shard is '3/2'; expected I/N"),
        (["--address", "auto"], "give --engine ray or --engine slurm"),
        (["--shard", "1/2", "--search", "10"], "run it without --shard"),
    ],
)
def test_what_cannot_be_is_one_line(grid_of, faces, tmp_path, monkeypatch, capsys, more, message):
    grid_of()
    monkeypatch.setenv("FACES", str(faces))
    with pytest.raises(SystemExit):
        main(["bench", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out"), "--device", "cpu", *more])
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.filterwarnings("ignore")  # submitit leaves its logs open
@pytest.mark.parametrize(("address", "methods"), [("debug", ["erm", "dam"]), ("local", ["dam"])])
def test_jobs_of_slurm_give_the_same_figures(grid_of, tmp_path, monkeypatch, address, methods):
    """In this process, and in one of its own for each cell, which takes seconds to start."""
    pytest.importorskip("submitit")
    grid = grid_of(seeds=[0], methods=methods, baseline=methods[0])
    with monkeypatch.context() as patched:
        patched.setattr(runner, "run_cells", in_this_process)
        run_grid(grid, tmp_path / "here", Workplace())
    there = Workplace(engine="slurm", address=address, folder=tmp_path)
    assert run_grid(grid, tmp_path / "there", there) == (0, len(methods), 0)
    assert figures(tmp_path / "there") == figures(tmp_path / "here")


def test_a_machine_without_slurm_is_told(grid_of, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"Slurm does not take the jobs .*srun.*: run this where `sbatch` works"):
        run_grid(grid_of(), tmp_path / "out", Workplace(engine="slurm", address="gpu", folder=tmp_path))


@pytest.fixture
def cluster(monkeypatch):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_survives_the_loss_of_a_node(grid_of, cluster, tmp_path, monkeypatch):
    """Eight cells on two nodes, one of which is taken away; the figures are those of one process."""
    grid = grid_of(seeds=list(range(4)))
    with monkeypatch.context() as patched:
        patched.setattr(runner, "run_cells", in_this_process)
        run_grid(grid, tmp_path / "here", Workplace())
    second = cluster.add_node(num_cpus=1)
    there = Workplace(engine="ray", address=cluster.address)
    seen = []

    def take_away(news):
        seen.append(news)
        if sum(one.row is not None for one in seen) == 2 and second is not None and not taken.is_set():
            taken.set()
            threading.Thread(target=cluster.remove_node, args=(second, False)).start()

    taken = threading.Event()
    first = run_grid(grid, tmp_path / "there", there, take_away)
    assert taken.is_set()
    assert first.done + first.failed == 8
    lost = [row for row in Store(tmp_path / "there").rows() if row["status"] == "failed"]
    assert all("the worker of this cell was lost" in row["error"] for row in lost)
    assert any(news.stage == "training" for news in seen)  # news on the way, as with processes
    again = run_grid(grid, tmp_path / "there", there)
    assert (again.before, again.done, again.failed) == (first.done, first.failed, 0)
    assert figures(tmp_path / "there") == figures(tmp_path / "here")


@pytest.mark.filterwarnings("ignore")
def test_without_an_address_no_cluster_is_joined_that_happens_to_run(monkeypatch):
    ray, asked = pytest.importorskip("ray"), []
    monkeypatch.setattr(ray, "init", lambda **how: asked.append(how["address"]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engines._connected(Workplace(engine="ray"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # as within a job that Ray itself has started
    engines._connected(Workplace(engine="ray"))
    assert asked == ["local", "auto"]


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_is_not_there_is_told(grid_of, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.socket() as nobody:  # it is bound and does not listen; Ray itself would wait for minutes
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        for asked, noted in (("auto", None), (address, None), ("auto", address)):  # of a cluster that has ended
            if noted is not None:
                (tmp_path / "ray" / "ray_current_cluster").write_text(noted)
            with pytest.raises(InputError, match=f"no cluster of Ray answers at {asked}"):
                run_grid(grid_of(), tmp_path / "out", Workplace(engine="ray", address=asked))
    assert not Store(tmp_path / "out").rows()


def test_a_worker_with_another_version_is_told(grid_of):
    with pytest.raises(FairheadError, match=r"has fairhead .* and the run 0\.0: install one version everywhere"):
        next(engines._stream(grid_of().cells()[0], Workplace(), "0.0"))
