"""The peer: Transformers' PyTorch models fine-tuned with the recipe of configs/finetune/common.py.

    OMP_NUM_THREADS=1 python tests/peers/finetune_peer.py --task sst2 --rows 2000 --seed 0 \\
        --weights DIR --data DATA

Needs the extra `parity`. AdamW with bias correction, eps 1e-6, weight decay 0.01 but not on biases
and LayerNorms, warm-up over a tenth of the steps, linear decay, clipping at 1, dropout 0.1. Every
text is tokenised once beforehand; each random batch is padded to its longest row, as
DataCollatorWithPadding does. Files are read and scores computed by bertjax (bertjax.data,
bertjax.evals: NumPy only), the rest is independent of it. Prints one JSON line.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from bertjax.data import glue, glue_tasks, squad, swag, tagging
from bertjax.evals import entity_scores, scores, squad_scores

SHARED = pathlib.Path(os.environ.get('BERTJAX_SHARED', '../shared')) / 'data'
IGNORED = -100
NOT_TIMED = 5  # first steps
STRIDE, N_BEST, LONGEST_ANSWER = 128, 20, 30  # run_qa's; its stride is the overlap of two windows

Example = dict[str, Any]
Outputs = list[np.ndarray]  # of each example, cut to its own length


@dataclasses.dataclass
class Task:
  """What there is to learn and how dev is scored."""

  model: type
  options: dict[str, Any]
  train: list[Example]
  dev: list[Example]
  score: Callable[[Outputs], dict[str, float]]
  metric: str


# --- Tasks --------------------------------------------------------------------------------------


def load_glue(name, tokenizer, data, rows, max_length) -> Task:
  spec = glue_tasks.find_task(name)

  def read(split, limit=None):
    found = glue.read(name, SHARED / 'glue_data', split)
    texts = [found.text_a[:limit]] + ([found.text_b[:limit]] if found.text_b else [])
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    labels = found.labels[:limit]
    return [{key: encoded[key][i] for key in encoded} | {'labels': labels[i].item()}
            for i in range(len(labels))], labels

  train, _ = read('train', rows or None)
  dev, labels = read('dev')
  problem = 'regression' if spec.kind == 'regression' else 'single_label_classification'
  return Task(
      transformers.BertForSequenceClassification,
      {'num_labels': spec.num_outputs, 'problem_type': problem}, train, dev,
      lambda outputs: scores.compute(spec.kind, spec.metrics, np.stack(outputs), labels),
      spec.metrics[0])


def load_hellaswag(name, tokenizer, data, rows, max_length) -> Task:
  def read(file, limit=None):
    found = swag.read(data / file)
    examples = []
    for number in range(len(found))[:limit]:
      endings = [f'{found.second[number]} {ending}' for ending in found.endings[number]]
      encoded = tokenizer([found.first[number]] * len(endings), endings, truncation=True,
                          max_length=max_length, padding=True)
      examples.append(dict(encoded) | {'labels': found.labels[number].item()})
    return examples, found.labels

  train, _ = read('hellaswag-train.jsonl', rows or None)
  dev, labels = read('hellaswag-dev.jsonl')
  return Task(transformers.BertForMultipleChoice, {}, train, dev,
              lambda outputs: swag.scores(np.stack(outputs), labels), 'accuracy')


def load_wnut17(name, tokenizer, data, rows, max_length) -> Task:
  training = tagging.read(data / 'wnut17-train.conll')
  dev = tagging.read(SHARED / 'ner/wnut17/emerging.dev.conll')
  names = tagging.label_list(training)

  def encode(sentences, limit=None):
    examples = []
    for words, tags in list(zip(sentences.tokens, sentences.tags, strict=True))[:limit]:
      encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
      owners = encoded.word_ids()
      first = [owner is not None and owners.index(owner) == i for i, owner in enumerate(owners)]
      labels = [names.index(tags[owner]) if begins else IGNORED
                for owner, begins in zip(owners, first, strict=True)]
      examples.append(dict(encoded) | {'labels': labels, 'words': [
          (i, owner) for i, owner in enumerate(owners) if first[i]]})
    return examples

  examples = encode(dev)

  def score(outputs):
    predicted = [['O'] * len(words) for words in dev.tokens]
    for row, example, logits in zip(predicted, examples, outputs, strict=True):
      for position, word in example['words']:
        row[word] = names[logits[position].argmax()]
    return entity_scores.scores(dev.tags, predicted)

  return Task(transformers.BertForTokenClassification, {'num_labels': len(names)},
              encode(training, rows or None), examples, score, 'f1')


def load_squad(name, tokenizer, data, rows, max_length) -> Task:
  version = 2 if name == 'squad2' else 1
  training = squad.read(data / f'squad{version}-train.json', version, training=True)
  questions = squad.read(data / f'squad{version}-dev.json', version)
  train = squad_windows(training[:rows or None], tokenizer, max_length, True)
  dev = squad_windows(questions, tokenizer, max_length, False)

  def score(outputs):
    texts, odds = squad_answers(questions, dev, outputs, version)
    if version == 1:
      return squad_scores.scores(questions, texts, 1)
    return squad_scores.scores(questions, texts, 2, odds, 0.0)

  return Task(transformers.BertForQuestionAnswering, {}, train, dev, score,
              'f1' if version == 1 else 'best_f1')


def squad_windows(questions, tokenizer, max_length, training) -> list[Example]:
  """run_qa's prepare_train_features and prepare_validation_features."""
  encoded = tokenizer(
      [q.question.lstrip() for q in questions], [q.context for q in questions],
      truncation='only_second', max_length=max_length, stride=STRIDE,
      return_overflowing_tokens=True, return_offsets_mapping=True)
  examples = []
  for window, number in enumerate(encoded['overflow_to_sample_mapping']):
    example = {key: encoded[key][window]
               for key in ('input_ids', 'token_type_ids', 'attention_mask')}
    context = [i for i, part in enumerate(encoded.sequence_ids(window)) if part == 1]
    offsets = encoded['offset_mapping'][window]
    if training:
      start, end = 0, 0
      if questions[number].answers:
        text, begin = questions[number].answers[0]
        finish = begin + len(text)
        if offsets[context[0]][0] <= begin and offsets[context[-1]][1] >= finish:
          start = max(i for i in context if offsets[i][0] <= begin)
          end = min(i for i in context if offsets[i][1] >= finish)
      example |= {'start_positions': start, 'end_positions': end}
    else:
      example |= {'question': number, 'offsets': {i: offsets[i] for i in context}}
    examples.append(example)
  return examples


def squad_answers(questions, windows, outputs, version):
  """run_qa's postprocess_qa_predictions: the best text and the null odds of each question."""
  best = {q.id: (-np.inf, '') for q in questions}
  null = {q.id: np.inf for q in questions}
  for window, logits in zip(windows, outputs, strict=True):
    question = questions[window['question']]
    null[question.id] = min(null[question.id], float(logits[0].sum()))
    starts, ends = (np.argsort(-logits[:, side])[:N_BEST].tolist() for side in (0, 1))
    offsets = window['offsets']
    for start in starts:
      for end in ends:
        if start in offsets and end in offsets and start <= end < start + LONGEST_ANSWER:
          total = float(logits[start, 0] + logits[end, 1])
          if total > best[question.id][0]:
            text = question.context[offsets[start][0]:offsets[end][1]]
            best[question.id] = total, text
  odds = {name: float(np.clip(null[name] - best[name][0], -1e9, 1e9)) for name in best}
  return {name: text for name, (_, text) in best.items()}, odds


LOADERS = {'sst2': load_glue, 'cola': load_glue, 'stsb': load_glue, 'rte': load_glue,
           'wnut17': load_wnut17, 'hellaswag': load_hellaswag, 'squad': load_squad,
           'squad2': load_squad}


# --- Batches ------------------------------------------------------------------------------------


def collate(examples: list[Example], pad_id: int) -> dict[str, torch.Tensor]:
  """Padded to the longest; choices of an example lie on a second axis."""
  batch = {}
  for name, padding in (('input_ids', pad_id), ('token_type_ids', 0), ('attention_mask', 0)):
    batch[name] = _padded([example[name] for example in examples], padding)
  for name in ('labels', 'start_positions', 'end_positions'):
    if name in examples[0]:
      values = [example[name] for example in examples]
      batch[name] = (_padded(values, IGNORED) if isinstance(values[0], list)
                     else torch.tensor(values))
  return batch


def _padded(rows: list, padding: int) -> torch.Tensor:
  flat = [row for example in rows for row in example] if isinstance(rows[0][0], list) else rows
  longest = max(map(len, flat))
  padded = torch.tensor([row + [padding] * (longest - len(row)) for row in flat])
  return padded if flat is rows else padded.view(len(rows), -1, longest)


# --- Training -----------------------------------------------------------------------------------


class Clock:
  """CPU time and wall time of the steps, the first few left out."""

  def __init__(self):
    self.step, self.rows, self.cpu, self.wall = 0, 0, 0.0, 0.0

  def __enter__(self):
    self._start = time.process_time(), time.monotonic()
    return self

  def __exit__(self, *_):
    self.step += 1
    if self.step > NOT_TIMED:
      self.cpu += time.process_time() - self._start[0]
      self.wall += time.monotonic() - self._start[1]
      self.rows += self.batch_rows


def make_optimizer(model, args, num_steps):
  plain, decayed = [], []
  for name, parameter in model.named_parameters():
    (plain if name.endswith('bias') or 'LayerNorm' in name else decayed).append(parameter)
  optimizer = torch.optim.AdamW(  # fused: the Trainer's default, and the fastest
      [{'params': decayed, 'weight_decay': 0.01}, {'params': plain, 'weight_decay': 0.0}],
      lr=args.lr, betas=(0.9, 0.999), eps=1e-6, fused=True)
  # Google's, as ours: the decay counts from step 0 (Transformers' counts from the end of warm-up).
  warmup = round(0.1 * num_steps)
  schedule = torch.optim.lr_scheduler.LambdaLR(
      optimizer, lambda step: step / warmup if step < warmup else 1 - step / num_steps)
  return optimizer, schedule


def evaluate(model, task: Task, batch_size: int, pad_id: int) -> dict[str, float]:
  model.eval()
  order = sorted(range(len(task.dev)), key=lambda i: -_length(task.dev[i]))
  outputs: list[Any] = [None] * len(task.dev)
  with torch.inference_mode():
    for first in range(0, len(order), batch_size):
      indices = order[first:first + batch_size]
      batch = collate([task.dev[i] for i in indices], pad_id)
      batch.pop('labels', None)
      out = model(**batch)
      logits = (torch.stack([out.start_logits, out.end_logits], -1)
                if 'start_logits' in out else out.logits).numpy()
      for i, row in zip(indices, logits, strict=True):
        outputs[i] = row[:_length(task.dev[i])] if logits.ndim == 3 else row
  model.train()
  return {name: value for name, value in task.score(outputs).items()
          if not isinstance(value, int)}  # counts


def _length(example: Example) -> int:
  ids = example['input_ids']
  return len(ids[0] if isinstance(ids[0], list) else ids)


def train(args) -> dict[str, Any]:
  torch.manual_seed(args.seed)
  tokenizer = transformers.AutoTokenizer.from_pretrained(args.weights)
  task = LOADERS[args.task](args.task, tokenizer, args.data, args.rows, args.max_length)
  model = task.model.from_pretrained(args.weights, **task.options).train()
  per_epoch = -(-len(task.train) // args.batch_size)
  optimizer, schedule = make_optimizer(model, args, args.epochs * per_epoch)
  clock, history, places, tokens = Clock(), [], 0, 0
  for _ in range(args.epochs):
    order = torch.randperm(len(task.train)).tolist()
    for first in range(0, len(order), args.batch_size):
      with clock:
        rows = [task.train[i] for i in order[first:first + args.batch_size]]
        batch = collate(rows, tokenizer.pad_token_id)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        clock.batch_rows = len(rows)
      places += batch['input_ids'].numel()
      tokens += int(batch['attention_mask'].sum())
    history.append(evaluate(model, task, args.batch_size, tokenizer.pad_token_id))
    print(json.dumps(history[-1]), file=sys.stderr, flush=True)
  best = max(history, key=lambda found: found[task.metric] if found[task.metric] is not None
             else -np.inf)
  return {
      'framework': 'peer', 'task': args.task, 'seed': args.seed, 'rows': args.rows,
      'examples': len(task.train), 'batch_size': args.batch_size, 'lr': args.lr,
      'epochs': args.epochs, 'steps': clock.step, 'steps_per_epoch': per_epoch,
      'metric': task.metric, 'score': best[task.metric], 'scores': history[-1],
      'best_scores': best, 'padding': 1 - tokens / places,
      'sequences_per_cpu_second': clock.rows / clock.cpu,
      'sequences_per_second': clock.rows / clock.wall,
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--task', choices=LOADERS, required=True)
  parser.add_argument('--weights', required=True, help='a Hugging Face directory')
  parser.add_argument('--data', type=pathlib.Path, required=True, help='from finetune_sets.py')
  parser.add_argument('--rows', type=int, default=0, help='first rows of the training file; 0: all')
  parser.add_argument('--epochs', type=int, default=3)
  parser.add_argument('--batch_size', type=int, default=32)
  parser.add_argument('--lr', type=float, default=2e-5)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--max_length', type=int, default=128)
  args = parser.parse_args()
  torch.set_num_threads(1)
  transformers.logging.set_verbosity_error()
  print(json.dumps(train(args)))


if __name__ == '__main__':
  main()
