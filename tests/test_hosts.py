"""Several processes as one run: they meet, see one workdir, end together, and read all the data."""

import contextlib
import dataclasses
import http.server
import logging
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import small_corpora

from bertjax import checkpoint, hosts, roll_call, step_folder
from bertjax.data import pipeline, pretrain, shard_writer, shards
from bertjax.data.examples import EpochBatches, Examples

ROOT = pathlib.Path(__file__).parents[1]
# Of the process that is left: our words and code 75, or JAX's own, whichever comes first; 2 if the
# other one was killed before it had called.
LEFT_ALONE = {roll_call.LOST: 'is gone', -6: 'another task died', 2: 'seen 1 within 40 s'}


def free_port() -> int:
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return free.getsockname()[1]


# --- The roll call -------------------------------------------------------------------------------


class Party:
  """Processes of a run as threads; what each of them was told."""

  def __init__(self, count: int, *, absent: tuple[int, ...] = ()):
    address = f'localhost:{free_port()}'
    self.calls = [roll_call.RollCall(address, count, number) for number in range(count)]
    self.errors: dict[int, str] = {}
    self.lost: dict[int, tuple[str, int]] = {}
    self.heard = threading.Event()
    self._absent = absent

  def meet(self, timeout: float) -> None:
    threads = [threading.Thread(target=self._meet, args=(number, timeout))
               for number in range(len(self.calls)) if number not in self._absent]
    for thread in reversed(threads):  # process 0 comes last
      thread.start()
      time.sleep(0.05)
    for thread in threads:
      thread.join()

  def _meet(self, number: int, timeout: float) -> None:
    try:
      self.calls[number].meet(timeout)
    except roll_call.HostError as error:
      self.errors[number] = str(error)

  def watch(self, *numbers: int) -> None:
    for number in numbers:
      self.calls[number].watch(lambda reason, code, number=number: self._note(number, reason, code))

  def _note(self, number, reason, code):
    self.lost[number] = reason, code
    if len(self.lost) == len(self.calls) - 1:
      self.heard.set()

  def close(self, number: int) -> None:
    """As if the process was killed."""
    for line in self.calls[number]._lines.values():
      line.connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def party(count: int, **more):
  made = Party(count, **more)
  try:
    yield made
  finally:
    for call in made.calls:
      for line in call._lines.values():
        line.connection.close()


def test_b125_too_few_processes_are_told_the_numbers_and_the_mend():
  with party(4, absent=(1, 3)) as four:
    four.meet(timeout=1)
  assert set(four.errors) == {0, 2}
  assert 'expected 4 processes, seen 2 within 1 s (not seen: 1, 3)' in four.errors[0]
  for text in four.errors.values():
    assert 'expected 4 processes, seen 2' in text and '--num_processes=4' in text
  with party(2, absent=(0,)) as two:
    two.meet(timeout=0.5)
  assert 'seen 1 within 0.5 s' in two.errors[1] and 'does not answer' in two.errors[1]


def visit(address: str, talk: bytes) -> None:
  """A stranger calls, once there is somebody who listens."""
  for _ in range(100):
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(
        ('localhost', int(address.rpartition(':')[2])), timeout=5) as stranger:
      stranger.sendall(talk)
      return
    time.sleep(0.1)
  raise AssertionError(f'nobody listens at {address}')


def test_strangers_doubles_and_other_numbers_do_not_disturb_the_meeting():
  with party(2, absent=(1,)) as two:
    address = two.calls[0]._address
    meeting = threading.Thread(target=two.meet, args=(20,))
    meeting.start()
    for talk in (b'GET / HTTP/1.1\r\n\r\n', b'[1]\n', b''):
      visit(address, talk)
    with pytest.raises(roll_call.HostError, match='for 3 processes, process 0 for 2'):
      roll_call.RollCall(address, 3, 1).meet(20)
    two.calls[1].meet(20)
    meeting.join()
    assert not two.errors
  with party(3, absent=(1, 2)) as three:
    address = three.calls[0]._address
    meeting = threading.Thread(target=three.meet, args=(3,))
    meeting.start()
    first = threading.Thread(target=three._meet, args=(1, 20))
    first.start()
    time.sleep(0.5)
    with pytest.raises(roll_call.HostError, match='two processes 1'):
      roll_call.RollCall(address, 3, 1).meet(20)
    meeting.join()
    first.join()
    assert 'seen 2' in three.errors[0] and three.errors[0] == three.errors[1]


@pytest.mark.parametrize('arguments, mend', [
    (('localhost', 2, 0), 'HOST:PORT'), (('localhost:1', 2, 2), '0 to 1')])
def test_what_cannot_be_is_refused(arguments, mend):
  with pytest.raises(roll_call.HostError, match=mend):
    roll_call.RollCall(*arguments)


def test_a_port_that_is_taken_is_said():
  with socket.create_server(('', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(roll_call.HostError, match='another run may be at work'):
      roll_call.RollCall(f'localhost:{port}', 2, 0).meet(1)


@pytest.mark.parametrize('gone', [0, 2])
def test_a_process_that_is_gone_is_named_to_all_others(gone):
  with party(3) as three:
    three.meet(20)
    assert not three.errors
    left = [number for number in range(3) if number != gone]
    three.watch(*left)
    three.close(gone)
    assert three.heard.wait(10)
    for number in left:
      reason, code = three.lost[number]
      assert f'process {gone} of 3 is gone' in reason and code == roll_call.LOST


def test_an_error_of_one_ends_the_others_and_an_error_of_all_ends_all_in_order(monkeypatch):
  monkeypatch.setattr(roll_call, 'GRACE', 0.5)
  with party(2) as two:
    two.meet(20)
    two.watch(0, 1)
    assert not two.calls[1].leave(2)
    assert two.heard.wait(10)
    assert two.lost == {0: ('process 1 of 2 ended with exit code 2: its log says why', 1)}
  with party(2) as two:
    two.meet(20)
    two.watch(0, 1)
    ended = []
    other = threading.Thread(target=lambda: ended.append(two.calls[1].leave(2)))
    other.start()
    assert two.calls[0].leave(2)
    other.join()
    assert ended == [True]
    time.sleep(0.7)
    assert not two.lost


@pytest.mark.parametrize('code', [0, 143])
def test_a_process_whose_work_is_done_frightens_nobody(code):
  with party(2) as two:
    two.meet(20)
    two.watch(0)
    assert two.calls[1].leave(code)
    two.close(1)
    time.sleep(0.3)
    assert not two.lost


# --- Platform and environment --------------------------------------------------------------------


def test_b126_the_first_line_says_platform_and_devices(caplog):
  with caplog.at_level('INFO', logger='absl'):
    hosts.announce('auto')
    hosts.announce('cpu')
  assert caplog.messages[0].startswith(f'Platform cpu: {jax.device_count()} device(s)')
  # JAX tells at this level of each platform that is not there, before that line.
  assert not logging.getLogger('jax._src.xla_bridge').isEnabledFor(logging.INFO)
  for absent, mend in (('gpu', 'nvidia-smi'), ('tpu', 'TPU VM')):
    with pytest.raises(hosts.HostError, match=f'--platform={absent}, but JAX finds cpu: .*{mend}'):
      hosts.announce(absent)


def test_slurm_is_found_out_and_no_cluster_is_said(monkeypatch):
  names = {'SLURM_JOB_ID': '77', 'SLURM_STEP_NODELIST': 'node[3-4]', 'SLURM_NTASKS': '2',
           'SLURM_PROCID': '1', 'SLURM_LOCALID': '0'}
  for name in names:
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('TPU_SKIP_MDS_QUERY', '1')
  with pytest.raises(hosts.HostError, match='no Cloud TPU, Slurm or GKE job'):
    hosts.start(None, None, None, find_out=True, timeout=1)
  for name, value in names.items():
    monkeypatch.setenv(name, value)
  address, count, number, devices = hosts._found_out(None, None, None, 1)
  assert address.startswith('node3:') and (count, number, devices) == (2, 1, [0])


@contextlib.contextmanager
def metadata_server(**attributes):
  """A stand-in for Google's; what a machine there knows of itself."""
  class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      value = attributes.get(self.path.rpartition('/')[2].replace('-', '_'))
      self.send_response(404 if value is None else 200)
      self.end_headers()
      self.wfile.write((value or '').encode())

    def log_message(self, *unused):
      pass

  with http.server.HTTPServer(('localhost', 0), Answer) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'localhost:{server.server_port}'
    server.shutdown()
    thread.join()


@pytest.fixture
def on_a_tpu_vm(monkeypatch):
  for name in [name for name in os.environ if name.startswith(('SLURM_', 'TPU_', 'MEGASCALE_'))]:
    monkeypatch.delenv(name)
  monkeypatch.setattr('jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm', True)
  return monkeypatch


def test_a_cloud_tpu_pod_is_found_out(on_a_tpu_vm):
  with metadata_server(agent_worker_number='1', tpu_env="MEGASCALE_NUM_SLICES: ''",
                       worker_network_endpoints='a:1:localhost,b:2:10.0.0.2') as address:
    on_a_tpu_vm.setenv('GCE_METADATA_IP', address)
    found = hosts._found_out(None, None, None, 5)
  assert found[0].startswith('localhost:') and found[1:3] == (2, 1)


@pytest.mark.parametrize('slices, count, number', [
    ({'NUM_SLICES': '', 'SLICE_ID': '', 'COORDINATOR_ADDRESS': ''}, 2, 1),
    ({'NUM_SLICES': '3', 'SLICE_ID': '2', 'COORDINATOR_ADDRESS': 'localhost:8080'}, 6, 5)])
def test_slices_of_gke_are_found_out(on_a_tpu_vm, slices, count, number):
  on_a_tpu_vm.setenv('TPU_WORKER_HOSTNAMES', 'localhost,host-1')
  on_a_tpu_vm.setenv('TPU_WORKER_ID', '1')
  on_a_tpu_vm.setenv('TPU_SKIP_MDS_QUERY', '1')
  with metadata_server(tpu_env='') as address:
    on_a_tpu_vm.setenv('GCE_METADATA_IP', address)
    for name, value in slices.items():
      on_a_tpu_vm.setenv(f'MEGASCALE_{name}', value)
    found = hosts._found_out(None, None, None, 5)
  assert found[0].startswith('localhost:') and found[1:3] == (count, number)


def test_a_metadata_server_that_is_not_there_is_told_in_words(on_a_tpu_vm):
  on_a_tpu_vm.setenv('GCE_METADATA_IP', f'localhost:{free_port()}')
  with pytest.raises(hosts.HostError, match='--distributed: .*refused'):
    hosts._found_out(None, None, None, 5)


def test_one_process_needs_no_other(tmp_path):
  assert hosts.start(None, None, None, find_out=False, timeout=1) is None
  roll_call.RollCall(f'localhost:{free_port()}', 1, 0).meet(1)
  hosts.check_workdir(tmp_path / 'new')
  assert hosts.leave(None, 2) == 2


# --- All of the data, whatever the number of files and processes ---------------------------------

SHARES = np.array([0, 1]), np.array([2, 3])  # of a batch of four rows in two processes
SCATTERED = pathlib.Path(__file__).parent / 'scattered_rows.py'


@pytest.mark.slow
def test_devices_of_a_host_may_lie_anywhere_in_the_mesh():
  """As in a TPU's; a CPU's own order would hide it. See scattered_rows.py."""
  port = free_port()
  names = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT),
                        'XLA_FLAGS': '--xla_force_host_platform_device_count=2'}
  both = [subprocess.Popen([sys.executable, SCATTERED, str(port), str(number)], env=names,
                           stderr=subprocess.PIPE, text=True) for number in range(2)]
  codes, texts = ends(both)
  assert codes == [0, 0], texts


@pytest.mark.parametrize('count, num_shards', [(9, 1), (9, 3), (2, 3)])  # 2 in 3: one is empty
def test_b080_b082_few_or_uneven_shards_give_each_example_to_one_process(count, num_shards):
  split = small_corpora.make_split(small_corpora.random_documents(1, count), num_shards)
  assert len(split.shards) == num_shards
  of = lambda **more: pretrain.ExampleStream(
      split, small_corpora.TinyVocabulary(),
      pretrain.PretrainSettings(seq_length=32, next_sentence='none'), **more)
  stream = of(heldout=True)
  both = [list(pipeline.heldout_batches(stream, 4, own)) for own in SHARES]
  assert len(both[0]) == len(both[1]) == -(-stream.num_examples // 4)
  rows = [row.tobytes() for share in both for batch in share for row in
          small_corpora.originals(batch) if (row != 1).any()]
  everything = small_corpora.originals(stream.batch(np.arange(stream.num_examples)))
  assert sorted(rows) == sorted(row.tobytes() for row in everything)
  # Training: the same number of steps for both, whatever there is to read.
  for own in SHARES:
    assert len(list(pipeline.batches(of(), 4, 0, 11, own))) == 11


def test_b081_all_processes_take_the_same_length_at_each_step():
  lengths = np.random.default_rng(0).integers(4, 129, 90)
  tokens = {name: [np.full(length, 7, np.int32) for length in lengths]
            for name in ('input_ids', 'token_type_ids', 'attention_mask')}
  made = Examples(tokens, {'labels': np.arange(90, dtype=np.int32)})
  both = [EpochBatches(made, (32, 128), 4, 5, own).batches(0, 50) for own in SHARES]
  shapes = [[batch['input_ids'].shape for batch in batches] for batches in both]
  assert shapes[0] == shapes[1] and set(shapes[0]) == {(2, 32), (2, 128)}


# --- Commands ------------------------------------------------------------------------------------


CONFIG = '''
from configs import common

def get_config():
  config = common.get_config()
  config.log_every = 1
  config.model.update(dict(
      hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
      max_position_embeddings=32, dtype='float32'))
  config.phases = (common.phase(seq_length=32, batch_size=4, num_steps=40),)
  config.optimizer.update(dict(learning_rate=3e-3, warmup_steps=8))
  config.checkpoint.update(dict(every=5, keep_last=3, keep_every=0))
  config.heldout.update(dict(every=25, max_examples=8))
  return config
'''


def command(home, workdir, *more) -> list[str]:
  return [sys.executable, '-m', 'bertjax.main', f'--config={home}/config.py',
          f'--workdir={workdir}', f'--config.data.path={home}/shards', *more]


def start(home, workdir, *more) -> subprocess.Popen:
  """One process with one device; programs are compiled once for all tests of this file."""
  names = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', 'TF_CPP_MIN_LOG_LEVEL': '3',
           'JAX_COMPILATION_CACHE_DIR': str(home / 'compiled'),
           'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  return subprocess.Popen(command(home, workdir, *more), cwd=ROOT, env=names,
                          stderr=subprocess.PIPE, text=True)


def start_two(home, *workdirs, more=()) -> list[subprocess.Popen]:
  address = f'localhost:{free_port()}'
  return [start(home, workdirs[number % len(workdirs)], f'--coordinator_address={address}',
                '--num_processes=2', f'--process_id={number}', '--init_timeout=40', *more)
          for number in range(2)]


def ends(processes) -> tuple[list[int], list[str]]:
  """Exit codes and logs; none may need more than five minutes."""
  texts = [process.communicate(timeout=300)[1] for process in processes]
  return [process.returncode for process in processes], texts


@pytest.fixture(scope='module')
def home(tmp_path_factory) -> pathlib.Path:
  """A configuration, and a data set of three shards."""
  folder = tmp_path_factory.mktemp('home')
  (folder / 'config.py').write_text(CONFIG, encoding='utf-8')
  draw = random.Random(0)
  words = [a + b for a in 'bdfgklmnprst' for b in ('an', 'el', 'ir', 'ot')]
  documents = ['\n'.join(' '.join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(8))
               for _ in range(40)]
  (folder / 'text.txt').write_text('\n\n'.join(documents), encoding='utf-8')
  (folder / 'vocab.txt').write_text(
      '\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *words, '']), encoding='utf-8')
  subprocess.run([sys.executable, '-m', 'bertjax.data.build', '--input', folder / 'text.txt',
                  '--tokenizer', folder / 'vocab.txt', '--output', folder / 'one', '--heldout',
                  '0.1'], cwd=ROOT, check=True, capture_output=True)
  cut_into_three(folder / 'one', folder / 'shards')
  return folder


def cut_into_three(source: pathlib.Path, target: pathlib.Path) -> None:
  """The same data set in three shards of about 5 : 5 : 1."""
  manifest = shards.load_manifest(source)
  shutil.copytree(source / 'tokenizer', target / 'tokenizer')
  splits = {}
  for name in manifest.splits:
    (shard,) = shards.open_split(source, name).shards
    writer = shard_writer.ShardWriter(target, name, 60, shard_tokens=len(shard.tokens) * 5 // 11)
    writer.append(np.asarray(shard.tokens), np.diff(shard.sentences), np.diff(shard.documents))
    splits[name] = writer.close()
  assert len(splits['train'].files) == 3
  shard_writer.write_manifest(target, dataclasses.replace(
      manifest, splits=splits,
      content_hash=shards.content_hash(splits, manifest.tokenizer['hash'])))


@pytest.fixture(scope='module')
def whole(home, tmp_path_factory) -> pathlib.Path:
  """The workdir of two processes that nothing disturbed."""
  workdir = tmp_path_factory.mktemp('whole')
  codes, texts = ends(start_two(home, workdir))
  assert codes == [0, 0], texts
  return workdir


def final_hash(workdir: pathlib.Path) -> str:
  assert step_folder.find(workdir).name == '40'
  return checkpoint.parameter_hash(checkpoint.restore_params(workdir))


@pytest.mark.slow
def test_b126_an_absent_platform_is_an_error_in_words(home, tmp_path):
  (code,), (text,) = ends([start(home, tmp_path, '--platform=gpu')])
  assert code == 2 and '--platform=gpu, but JAX finds' in text and 'Traceback' not in text
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_b125_one_of_two_processes_alone_ends_with_both_numbers(home, tmp_path):
  alone = start(home, tmp_path, f'--coordinator_address=localhost:{free_port()}',
                '--num_processes=2', '--process_id=0', '--init_timeout=5')
  (code,), (text,) = ends([alone])
  assert code == 2 and 'Traceback' not in text
  assert 'expected 2 processes, seen 1' in text and 'not seen: 1' in text


@pytest.mark.slow
def test_b086_different_workdirs_are_refused_on_all_processes_before_step_1(home, tmp_path):
  codes, texts = ends(start_two(home, tmp_path / 'here', tmp_path / 'there'))
  assert codes == [2, 2], texts
  for text in texts:
    assert 'not there for process(es) 1 of 2' in text and 'Traceback' not in text
  assert not list((tmp_path / 'here').iterdir()) and not (tmp_path / 'there').exists()


@pytest.mark.slow
def test_processes_may_share_rows_where_the_model_axis_runs_across_them(home, whole, tmp_path):
  codes, texts = ends(start_two(home, tmp_path, more=['--config.mesh.model=2']))
  assert codes == [0, 0], texts
  assert "'model': 2" in texts[0]
  ours, theirs = (checkpoint.leaves(checkpoint.restore_params(w)) for w in (tmp_path, whole))
  for name in ours:
    np.testing.assert_allclose(ours[name], theirs[name], atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_b080_b082_three_shards_for_two_processes_end_at_the_same_step(whole):
  final_hash(whole)
  assert not list(whole.glob('.same-workdir*'))


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_both_resume_to_the_same_weights(
    home, whole, tmp_path):
  """At start-up, and then during the steps; BERTJAX_KILLS=10 kills more often than CI can wait."""
  draw = random.Random(5)
  kills = int(os.environ.get('BERTJAX_KILLS', '2'))
  for turn in range(kills):
    both = start_two(home, tmp_path)
    victim = draw.randrange(2)
    if turn == 0:
      time.sleep(draw.uniform(1, 6))
    else:
      for line in both[0].stderr:
        found = re.search(r'step +(\d+)/40 ', line)
        if found and int(found[1]) >= 36 * turn // kills:
          break
    assert [process.poll() for process in both] == [None, None]
    both[victim].kill()
    killed = time.monotonic()
    text = both[1 - victim].communicate(timeout=60)[1]  # TimeoutExpired: it hangs
    assert time.monotonic() - killed < 60
    assert LEFT_ALONE.get(both[1 - victim].returncode, 'no such code') in text, (turn, victim, text)
    both[victim].communicate()
  codes, texts = ends(start_two(home, tmp_path))
  assert codes == [0, 0], texts
  assert final_hash(tmp_path) == final_hash(whole)
