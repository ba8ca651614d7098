"""Times the real train step on a synthetic batch, in CPU time and wall time, as JSON.

  taskset -c 0 python -m bertjax.tools.bench_step --size base --seconds 8

Sizes, batch and FLOP count are those of usual comparisons: length 128, 20 prediction slots of which
19 are used, vocabulary 30,522, dropout 0.1, float32. Quote ratios measured side by side, never one
time.
"""

import argparse
import json
import os
import statistics
import time

from bertjax import host_memory

host_memory.keep_freed_memory()  # as main.py does, before JAX is imported

import jax
import numpy as np

from bertjax import heads, model, objectives, optim, sharding, state, step

SIZES = {  # layers, hidden, heads, intermediate, batch
    'tiny': (2, 128, 2, 512, 32),
    'mini': (4, 256, 4, 1024, 32),
    'small': (4, 512, 8, 2048, 16),
    'base': (12, 768, 12, 3072, 8),
    'large': (24, 1024, 16, 4096, 8),
}
LENGTH, PREDICTIONS, VOCABULARY = 128, 20, 30522


def synthetic_batch(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
  """A full batch of random tokens with 19 of 20 prediction slots used."""
  draw = np.random.default_rng(seed)
  ids = draw.integers(1000, VOCABULARY, (rows, LENGTH)).astype(np.int32)
  positions = np.sort(
      np.argsort(draw.random((rows, LENGTH - 2)), 1)[:, :PREDICTIONS] + 1, 1).astype(np.int32)
  border = draw.integers(LENGTH // 4, 3 * LENGTH // 4, (rows, 1))
  used = np.arange(PREDICTIONS)[None] < round(LENGTH * 0.15)
  return {
      'input_ids': ids,
      'token_type_ids': (np.arange(LENGTH)[None] >= border).astype(np.int32),
      'attention_mask': np.ones((rows, LENGTH), np.int32),
      'masked_lm_positions': positions,
      'masked_lm_ids': np.take_along_axis(ids, positions, 1),
      'masked_lm_weights': np.broadcast_to(used, positions.shape).astype(np.float32),
      'next_sentence_labels': draw.integers(0, 2, rows).astype(np.int32),
      'next_sentence_weights': np.ones(rows, np.float32),
  }


def build(size: str, dropout: float, unroll: int, dtype: str, mesh):
  """The step of `size`, its first state and a batch."""
  layers, hidden, num_heads, intermediate, rows = SIZES[size]
  config = model.BertConfig(
      vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers,
      num_attention_heads=num_heads, intermediate_size=intermediate, hidden_dropout_prob=dropout,
      attention_probs_dropout_prob=dropout, dtype=dtype, scan_unroll=unroll or layers)
  make_model = lambda rngs: heads.BertForPreTraining(config, rngs)
  graphdef, shapes = state.split(make_model)
  settings = optim.OptimizerSettings(learning_rate=1e-4, warmup_steps=0, num_steps=10**6)
  optimizer = optim.make(settings, shapes)
  like = state.abstract(shapes, optimizer, mesh)
  first = state.create(make_model, 0, optimizer, like)
  train_step = step.TrainStep(graphdef, objectives.PRETRAINING, optimizer, settings)
  batch = jax.device_put(synthetic_batch(rows), sharding.batch_sharding(mesh))
  return step.jit_train_step(train_step, like), first, batch


def measure(compiled, first, batch, seconds: float) -> tuple[list[float], list[float], float]:
  """CPU and wall seconds of each step after two that are not counted, and the last loss."""
  current, cpu, wall = first, [], []
  end = time.perf_counter() + seconds
  while len(wall) < 5 or time.perf_counter() < end:
    began, began_cpu = time.perf_counter(), time.process_time()
    current, metrics = compiled(current, batch)
    jax.block_until_ready(metrics)
    wall.append(time.perf_counter() - began)
    cpu.append(time.process_time() - began_cpu)
  loss = float(metrics['masked_lm_loss_sum'] / metrics['masked_lm_weight'])
  return cpu[2:], wall[2:], loss


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--size', choices=SIZES, default='tiny')
  parser.add_argument('--seconds', type=float, default=8, help='how long to measure')
  parser.add_argument('--dropout', type=float, default=0.1)
  parser.add_argument('--unroll', type=int, default=0, help='layers per scan step; 0: all')
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--hlo', help='write the compiled program to this file')
  args = parser.parse_args()
  mesh = sharding.make_mesh(sharding.MeshSettings())
  with jax.set_mesh(mesh):
    jitted, first, batch = build(args.size, args.dropout, args.unroll, args.dtype, mesh)
    began = time.perf_counter()
    compiled = jitted.lower(first, batch).compile()
    compile_s = time.perf_counter() - began
    if args.hlo:
      with open(args.hlo, 'w', encoding='utf-8') as file:
        file.write(compiled.as_text())
    cpu, wall, loss = measure(compiled, first, batch, args.seconds)
  rows = SIZES[args.size][-1]
  print(json.dumps({
      'size': args.size, 'cores': len(os.sched_getaffinity(0)), 'steps': len(cpu),
      'cpu_ms': round(1e3 * statistics.median(cpu), 1), 'cpu_min_ms': round(1e3 * min(cpu), 1),
      'wall_ms': round(1e3 * statistics.median(wall), 1),
      'sequences_per_cpu_second': round(rows / statistics.median(cpu), 2),
      'compile_s': round(compile_s, 1), 'loss': round(loss, 3)}))


if __name__ == '__main__':
  main()
