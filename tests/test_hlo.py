"""Counts read from programs: by hand for a small text, against known ones for compiled steps."""

import jax
import jax.numpy as jnp
import pytest
from test_model import TINY
from test_step import SETTINGS, uneven_batches

from bertjax import heads, objectives, optim, sharding, state, step
from bertjax.tools import hlo

# As a TPU's compiler writes: products as convolutions, an unrolled loop, a collective written where
# it starts and where it ends, attributes that go over several lines.
TEXT = '''HloModule jit_step, is_scheduled=true

%start (p: bf16[16,8]) -> bf16[64,8] {
  %p = bf16[16,8]{1,0} parameter(0)
  ROOT %g = bf16[64,8]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}

%end (p: bf16[16,8]) -> bf16[64,8] {
  %p = bf16[16,8]{1,0} parameter(0)
  ROOT %g = bf16[64,8]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}

%product (a: bf16[32,8], b: bf16[8,4]) -> bf16[32,4] {
  %a = bf16[32,8]{1,0} parameter(0)
  %b = bf16[8,4]{1,0} parameter(1)
  ROOT %c = bf16[32,4]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%all-reduce-scatter (p: f32[64,8]) -> f32[16,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %r = f32[64,8]{1,0} all-reduce(%p), channel_id=9, to_apply=%add
  ROOT %s = f32[16,8]{1,0} dynamic-slice(%r), dynamic_slice_sizes={16,8}
}

%body (s: (u32[], bf16[32,8], bf16[8,4])) -> (u32[], bf16[32,8], bf16[8,4]) {
  %s = (u32[], bf16[32,8]{1,0}, bf16[8,4]{1,0}) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %two = u32[] constant(2)
  %next = u32[]{:T(128)} add(%i, %two), control-predecessors={%x}
  %x = bf16[32,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%s), index=1
  %w = bf16[8,4]{1,0} get-tuple-element(%s), index=2
  %f = bf16[32,4]{1,0} fusion(%x, %w), kind=kOutput, calls=%product, metadata={
"text":"over several lines"
}}, more={1}
  %h = bf16[32,8]{1,0} collective-permute(%x), channel_id=8, source_target_pairs={{0,1}}
  ROOT %t = (u32[], bf16[32,8]{1,0}, bf16[8,4]{1,0}) tuple(%next, %h, %w)
}

%condition (s: (u32[], bf16[32,8], bf16[8,4])) -> pred[] {
  %s = (u32[], bf16[32,8]{1,0}, bf16[8,4]{1,0}) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %n = u32[] constant(6)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[32,8], w: bf16[8,4], g: f32[64,8]) -> f32[16,8] {
  %x = bf16[32,8]{1,0} parameter(0)
  %w = bf16[8,4]{1,0} parameter(1)
  %g = f32[64,8]{1,0} parameter(2)
  %zero = u32[] constant(0)
  %t = (u32[], bf16[32,8]{1,0}, /*index=2*/bf16[8,4]{1,0}) tuple(%zero, %x, %w)
  %loop = (u32[], bf16[32,8]{1,0}, bf16[8,4]{1,0}) while(%t), condition=%condition, body=%body
  %half = bf16[16,8]{1,0} slice(%x), slice={[0:16], [0:8]}
  %started = bf16[64,8]{1,0} fusion(%half), kind=kCustom, calls=%start
  %ended = bf16[64,8]{1,0} fusion(%half), kind=kCustom, calls=%end
  %kernel.1 = bf16[32,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %shares = f32[16,8]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter
}
'''


def test_a_small_text_is_counted_as_by_hand():
  found = hlo.analyse(TEXT)
  assert found.loops == (hlo.Loop(3, {'collective-permute': 1}),)  # 0, 2, 4
  assert found.matmul_flops == 3 * 2 * 32 * 8 * 4
  assert found.collectives == {
      'all-gather': hlo.Traffic(1, 64 * 8 * 2), 'reduce-scatter': hlo.Traffic(1, 64 * 8 * 4),
      'collective-permute': hlo.Traffic(3, 3 * 32 * 8 * 2)}
  assert found.kernels == {hlo.Kernel('kernel', ((32, 8),)): 1}


def test_what_the_compiler_computes_again_is_counted_by_its_names():
  assert hlo.analyse(TEXT).rescues == 0
  assert hlo.analyse(TEXT.replace('%half', '%half.remat2')).rescues == 1


def test_arrays_in_fast_memory_are_no_traffic_of_the_main_memory():
  """The loop's product reads x from S(1) and w from the main memory; the permute writes x there."""
  program = hlo.parse(TEXT)
  counter = 3 * 4
  assert hlo._hbm_bytes(program, 'body') == 2 * (8 * 4 + 32 * 4) + 2 * 32 * 8 + counter


@pytest.mark.parametrize('window, lhs, rhs, out, labels, flops', [
    # A product of [2, 4, 8] with [2, 8, 16], batch axis as a spatial one: XLA's way.
    ('size=2 stride=1 pad=0_0 lhs_dilate=2', '2,4,8', '2,8,16', '2,4,16', '0bf_0io->0bf',
     2 * 2 * 4 * 8 * 16),
    # The sum over two pieces of the contracted axis.
    ('size=2', '4,2,8', '2,8,16', '4,16,1', 'b0f_0io->bf0', 2 * 4 * 2 * 8 * 16),
    # Pieces of the output, with the padding that makes room for them.
    ('size=2 pad=1_1 rhs_reversal=1', '4,8,1', '2,8,16', '4,2,16', 'bf0_0io->b0f',
     2 * 4 * 8 * 2 * 16),
])
def test_convolutions_that_are_products_count_as_products(window, lhs, rhs, out, labels, flops):
  text = f'''ENTRY %main (a: f32[{lhs}], b: f32[{rhs}]) -> f32[{out}] {{
  %a = f32[{lhs}] parameter(0)
  %b = f32[{rhs}] parameter(1)
  ROOT %c = f32[{out}] convolution(%a, %b), window={{{window}}}, dim_labels={labels}
}}
'''
  assert hlo.analyse(text).matmul_flops == flops


def test_a_kernel_of_cudnn_goes_by_its_target():
  text = '''ENTRY %main (q: bf16[2,8,4,16]) -> (bf16[2,4,8,16], u8[0]) {
  %q = bf16[2,8,4,16] parameter(0)
  ROOT %a.3 = (bf16[2,4,8,16], u8[0]) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"
}
'''
  assert hlo.analyse(text).kernels == {hlo.Kernel('__cudnn$fmhaSoftmax', ((2, 8, 4, 16),)): 1}


def test_what_is_no_program_is_refused():
  with pytest.raises(hlo.HloError, match='ENTRY'):
    hlo.parse('HloModule jit_step')


def test_a_scan_counts_as_often_as_it_runs():
  def layers(x, kernels):
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0].sum()

  gradient = jax.jit(jax.grad(layers, argnums=(0, 1)))
  shapes = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct(
      (5, 32, 32), jnp.float32)
  found = hlo.analyse(gradient.lower(*shapes).compile().as_text())
  assert found.matmul_flops == 3 * 5 * 2 * 16 * 32 * 32  # forward, and twice backward
  assert [loop.trips for loop in found.loops] == [5, 5]
  assert not found.collectives


# --- The train step ------------------------------------------------------------------------------


def analysed(**mesh):
  """The train step of the tiny model on a mesh of eight."""
  build = lambda rngs: heads.BertForPreTraining(TINY, rngs)
  graphdef, shapes = state.split(build)
  optimizer = optim.make(SETTINGS, shapes)
  mesh = sharding.make_mesh(sharding.MeshSettings(**mesh))
  with jax.set_mesh(mesh):
    like = state.abstract(shapes, optimizer, mesh)
    train = step.TrainStep(graphdef, objectives.PRETRAINING, optimizer, SETTINGS)
    batch = jax.device_put(uneven_batches(1)[0], sharding.batch_sharding(mesh))
    return hlo.analyse(step.jit_train_step(train, like).lower(like, batch).compile().as_text())


def test_pure_data_parallelism_has_all_reduces_and_nothing_else():
  found = analysed(data=8)
  assert set(found.collectives) == {'all-reduce'}
  # Gradients of all parameters and a few scalars.
  _, shapes = state.split(lambda rngs: heads.BertForPreTraining(TINY, rngs))
  parameters = 4 * state.count_parameters(shapes)
  assert parameters <= found.collectives['all-reduce'].nbytes < parameters + 100_000


def test_fsdp_gathers_each_weight_matrix_once_a_pass_and_has_no_all_to_all():
  found = analysed(data=1, fsdp=8)
  assert 'all-to-all' not in found.collectives
  forward, backward = (loop for loop in found.loops if loop.trips == TINY.num_hidden_layers)
  for loop in (forward, backward):  # query, key, value, output; intermediate, output
    assert loop.collectives.get('all-gather', 0) <= 6
    assert 'collective-permute' not in loop.collectives
  assert forward.collectives['all-gather'] == 6
