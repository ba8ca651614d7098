import random, time, pathlib, json, sys
sys.path.insert(0, '/work/main/tests')
import small_checkpoint as small
from bertjax.finetune import glue
from configs.finetune import glue as recipe

def test_proto(tmp_path, capsys):
  import jax
  jax.config.update('jax_compilation_cache_dir', str(tmp_path/'cache'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)

  t=time.process_time(); w=time.time()
  def lap(name):
    nonlocal t, w
    with capsys.disabled(): print(name, 'cpu %.1f wall %.1f' % (time.process_time()-t, time.time()-w), flush=True)
    t=time.process_time(); w=time.time()
  ckpt = small.make(tmp_path/'ckpt'); lap('ckpt')
  draw = random.Random(0)
  def rows(n, with_label=True):
    out = ['index\tsentence1\tsentence2' + ('\tlabel' if with_label else '')]
    for i in range(n):
      yes = draw.random() < .5
      out.append(f'{i}\t{small.sentence(draw)}\t{small.sentence(draw, *["red"]*yes)}' + ('\t' + ('entailment' if yes else 'not_entailment') if with_label else ''))
    return '\n'.join(out)+'\n'
  (tmp_path/'RTE').mkdir()
  (tmp_path/'RTE'/'train.tsv').write_text(rows(160)); (tmp_path/'RTE'/'dev.tsv').write_text(rows(61))
  (tmp_path/'RTE'/'test.tsv').write_text(rows(13, False))
  for n in (1,2,3):
   with small.devices(1):
    jax.clear_caches()
    config = small.shrink(recipe.get_config('task=rte'), ckpt, path=tmp_path)
    config.seq_lengths = (16,)
    lap('pre')
    assert glue.fine_tune(config, str(tmp_path/f'run{n}')) == 0
    lap(f'train{n}')
    with capsys.disabled():
      for r in small.records(tmp_path/f'run{n}','dev'): print(r)
    config.mode='eval'
    assert glue.fine_tune(config, str(tmp_path/f'run{n}')) == 0
    lap('eval')
    config.mode='predict'
    assert glue.fine_tune(config, str(tmp_path/f'run{n}')) == 0
    lap('predict')
