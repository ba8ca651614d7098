"""Measures the input pipeline and prints one JSON object.

    python -m bertjax.tools.bench_data throughput            # examples per core-second
    python -m bertjax.tools.bench_data memory --text_mb 300  # anonymous memory; compare with 30
    python -m bertjax.tools.bench_data scale                 # 30 million examples, cold

With --data the shards of `data.build` are measured. Otherwise shards are made up in a temporary
folder: log-normal lengths as of English prose, random ids. Rates are per second of CPU time of the
whole process, pinned to one core where the system allows it, so that other users of the machine
matter less; the best of several rounds counts, and all are printed.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # before anything loads TensorFlow

import numpy as np

import bertjax
from bertjax.data import pipeline, pretrain
from bertjax.data import shards as shards_lib

_BATCH = 256
_BYTES_PER_TOKEN = 4.4  # of English text under a 30,000-word vocabulary


class _Vocabulary:
  """Stands in for a tokenizer of 30,522 entries, 7% of text tokens continuing a word."""

  vocab_size, pad_id, cls_id, sep_id, mask_id = 30522, 0, 101, 102, 103
  ordinary_ids = np.arange(999, 30522, dtype=np.int32)
  continuation = np.arange(30522) % 14 == 0


def make_shards(folder: pathlib.Path, num_tokens: int, num_shards: int, sparse: bool) -> None:
  """Writes made-up shards and their manifest.

  Args:
    folder: where the files go.
    num_tokens: of all shards together.
    num_shards: how many shards share them.
    sparse: leave the ids zero, so that the files take next to no space on the disk.
  """
  rng = np.random.default_rng(0)
  infos = []
  for shard in range(num_shards):
    size = num_tokens // num_shards
    lengths = np.clip(rng.lognormal(3.1, 0.5, size // 20), 1, 400).astype(np.uint32)
    sentences = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)
    sentences = sentences[: np.searchsorted(sentences, size)]
    sizes = np.clip(rng.lognormal(2.8, 1.0, len(sentences) // 10), 1, 5000).astype(np.uint32)
    documents = np.concatenate([[0], np.cumsum(sizes)])
    documents = np.append(documents[documents < len(sentences) - 1], len(sentences) - 1)
    name = f'train-{shard:05d}-of-{num_shards:05d}'
    tokens = np.lib.format.open_memmap(
        folder / f'{name}.tokens.npy', 'w+', np.uint16, (int(sentences[-1]),)
    )
    if not sparse:
      tokens[:] = rng.integers(1000, 30000, len(tokens))
    tokens.flush()
    np.save(folder / f'{name}.sentences.npy', sentences)
    np.save(folder / f'{name}.documents.npy', documents.astype(np.uint32))
    files = dict.fromkeys(('tokens', 'sentences', 'documents'), '')
    counts = len(documents) - 1, len(sentences) - 1, int(sentences[-1])
    infos.append(shards_lib.ShardInfo(name, files, *counts))
  total = [
      sum(getattr(info, f'num_{of}') for info in infos)
      for of in ('documents', 'sentences', 'tokens')
  ]
  manifest = shards_lib.Manifest(
      corpus={}, tokenizer={}, splits={'train': shards_lib.SplitInfo(*total, tuple(infos))},
      duplicates_dropped=0, encoding={}, unknown_token_share=0.0, unigram_entropy=0.0,
      word_borders=False, content_hash='', bertjax_version=bertjax.__version__,
  )
  text = json.dumps(dataclasses.asdict(manifest))
  (folder / shards_lib.MANIFEST).write_text(text, encoding='utf-8')


def memory_mb(field: str) -> float:
  """A line of /proc/self/status in megabytes, e.g. 'RssAnon' (Linux)."""
  status = pathlib.Path('/proc/self/status').read_text(encoding='utf-8')
  (line,) = [line for line in status.splitlines() if line.startswith(field + ':')]
  return int(line.split()[1]) / 1024


def throughput(split: shards_lib.Split, tokenizer, rounds: int, steps: int) -> dict:
  """Masked examples per second of CPU time through tf.data, by setting."""
  out = {}
  for seq_length in (128, 512):
    for whole_words in (False, True):
      settings = pretrain.PretrainSettings(seq_length=seq_length, whole_word_masking=whole_words)
      stream = pretrain.ExampleStream(split, tokenizer, settings)
      batches = pipeline.batches(stream, _BATCH, 0, 10**9)
      for _ in range(20):
        next(batches)
      rates = []
      for _ in range(rounds):
        begin = time.process_time()
        for _ in range(steps):
          next(batches)
        rates.append(round(steps * _BATCH / (time.process_time() - begin)))
      name = f'{seq_length}{"_whole_words" if whole_words else ""}'
      out[name] = {'examples_per_core_second': max(rates), 'rounds': rates}
  return out


def memory(split: shards_lib.Split, tokenizer, text_mb: int) -> dict:
  """Most anonymous memory in 1,500 batches above that after the imports."""
  _start_tensorflow()
  before, peak = memory_mb('RssAnon'), 0.0
  stream = pretrain.ExampleStream(split, tokenizer, pretrain.PretrainSettings())
  for _ in pipeline.batches(stream, _BATCH, 0, 1500):
    peak = max(peak, memory_mb('RssAnon') - before)
  return {'text_mb': text_mb, 'rss_anon_growth_mb': round(peak, 1)}


def scale(split: shards_lib.Split, tokenizer) -> dict:
  """First batch, and a seek into epoch 30."""
  _start_tensorflow()
  before, anon = memory_mb('VmRSS'), memory_mb('RssAnon')
  wall, cpu = [time.perf_counter()], [time.process_time()]

  def lap():
    wall.append(time.perf_counter())
    cpu.append(time.process_time())

  stream = pretrain.ExampleStream(split, tokenizer, pretrain.PretrainSettings())
  lap()
  next(pipeline.batches(stream, _BATCH, 0, 1))
  lap()
  fresh = pretrain.ExampleStream(split, tokenizer, pretrain.PretrainSettings())
  next(pipeline.batches(fresh, _BATCH, int(30.4 * stream.num_examples) // _BATCH, 1))
  lap()
  return {
      'examples_per_epoch': stream.num_examples, 'sentences': split.num_sentences,
      'documents': split.num_documents, 'tokens': split.num_tokens,
      'open_wall_cpu_s': [round(wall[1] - wall[0], 2), round(cpu[1] - cpu[0], 2)],
      'open_and_first_batch_wall_cpu_s': [round(wall[2] - wall[0], 2), round(cpu[2] - cpu[0], 2)],
      'open_and_seek_epoch_30_wall_cpu_s': [
          round(wall[3] - wall[2], 2), round(cpu[3] - cpu[2], 2)
      ],
      'rss_growth_mb': round(memory_mb('VmRSS') - before, 1),
      'rss_anon_growth_mb': round(memory_mb('RssAnon') - anon, 1),
      'peak_rss_mb': round(memory_mb('VmHWM'), 1),
      'rss_before_mb': round(before, 1),
  }


def _start_tensorflow() -> None:
  """Imports TensorFlow and makes it set up its threads, so that neither is measured."""
  import tensorflow as tf

  list(tf.data.Dataset.range(1).as_numpy_iterator())


def _measure(args: argparse.Namespace, folder: str) -> dict:
  split, tokenizer = shards_lib.open_split(folder), _Vocabulary()
  if args.data:
    tokenizer = shards_lib.load_tokenizer(folder)
  if args.core >= 0 and hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {args.core})
  if args.what == 'throughput':
    return throughput(split, tokenizer, args.rounds, args.steps)
  if args.what == 'memory':
    return memory(split, tokenizer, args.text_mb)
  return scale(split, tokenizer)


def main(arguments: list[str] | None = None) -> int:
  """The command line; returns the exit status."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('what', choices=['throughput', 'memory', 'scale'])
  parser.add_argument('--data', help='a folder of data.build; default: made-up shards')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--steps', type=int, default=40, help='batches of 256 per round')
  parser.add_argument('--text_mb', type=int, default=30, help='made-up text for memory')
  parser.add_argument('--tokens', type=int, default=2_600_000_000, help='made-up ids for scale')
  parser.add_argument('--core', type=int, default=0, help='core to run on; -1: any')
  args = parser.parse_args(arguments)
  with tempfile.TemporaryDirectory() as folder:
    try:
      if not args.data:
        tokens, num_shards = {
            'throughput': (10_000_000, 1), 'scale': (args.tokens, 14),
            'memory': (int(args.text_mb * 1e6 / _BYTES_PER_TOKEN), 1),
        }[args.what]
        # In a process of its own, so that its memory is not measured.
        maker = multiprocessing.get_context('spawn').Process(
            target=make_shards, args=(pathlib.Path(folder), tokens, num_shards, num_shards > 1)
        )
        maker.start()
        maker.join()
      result = _measure(args, args.data or folder)
    except shards_lib.ShardError as error:
      print(error, file=sys.stderr)
      return 2
  print(json.dumps({args.what: result, 'batch_size': _BATCH}, indent=2))
  return 0


if __name__ == '__main__':
  sys.exit(main())
