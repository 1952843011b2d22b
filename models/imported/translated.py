"""Names of the operations that TensorFlow carries out.

Torch decomposes the others while it exports a model.
"""

_NAMES = """
aten.__and__.Scalar aten.__and__.Tensor aten.__or__.Scalar aten.__or__.Tensor aten.__xor__.Scalar aten.__xor__.Tensor
aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool3d.default aten._assert_scalar.default aten._assert_tensor_metadata.default
aten._cdist_forward.default aten._conj.default aten._embedding_bag.default aten._embedding_bag_forward_only.default aten._fft_c2c.default
aten._fft_c2r.default aten._fft_r2c.default aten._linalg_check_errors.default aten._linalg_det.default aten._linalg_slogdet.default
aten._linalg_solve_ex.default aten._log_softmax.default aten._native_batch_norm_legit.no_stats
aten._native_batch_norm_legit_functional.default aten._native_batch_norm_legit_no_training.default aten._prelu_kernel.default
aten._softmax.default aten._to_copy.default aten._unsafe_index.Tensor aten._unsafe_index_put.default aten._unsafe_view.default
aten._upsample_bicubic2d_aa.default aten._upsample_bicubic2d_aa.vec aten._upsample_bilinear2d_aa.default aten._upsample_bilinear2d_aa.vec
aten._upsample_nearest_exact1d.default aten._upsample_nearest_exact1d.vec aten._upsample_nearest_exact2d.default
aten._upsample_nearest_exact2d.vec aten._upsample_nearest_exact3d.default aten._upsample_nearest_exact3d.vec aten.abs.default
aten.acos.default aten.acosh.default aten.adaptive_avg_pool1d.default aten.adaptive_avg_pool2d.default aten.adaptive_avg_pool3d.default
aten.adaptive_max_pool1d.default aten.adaptive_max_pool2d.default aten.adaptive_max_pool3d.default aten.add.Scalar aten.add.Tensor
aten.addcmul.default aten.addmm.default aten.alias.default aten.all.default aten.all.dim aten.all.dims aten.amax.default aten.amin.default
aten.angle.default aten.any.default aten.any.dim aten.any.dims aten.arange.default aten.arange.start aten.arange.start_step
aten.argmax.default aten.argmin.default aten.argsort.default aten.argsort.stable aten.as_strided.default aten.as_strided_copy.default
aten.asin.default aten.asinh.default aten.atan.default aten.atan2.default aten.atanh.default aten.avg_pool1d.default
aten.avg_pool2d.default aten.avg_pool3d.default aten.baddbmm.default aten.batch_norm.default aten.bernoulli.p aten.bilinear.default
aten.binary_cross_entropy.default aten.binary_cross_entropy_with_logits.default aten.bitwise_and.Scalar aten.bitwise_and.Tensor
aten.bitwise_not.default aten.bitwise_or.Scalar aten.bitwise_or.Tensor aten.bitwise_xor.Scalar aten.bitwise_xor.Tensor aten.bmm.default
aten.broadcast_to.default aten.bucketize.Tensor aten.cat.default aten.cdist.default aten.ceil.default aten.celu.default
aten.channel_shuffle.default aten.chunk.default aten.clamp.Tensor aten.clamp.default aten.clamp_max.default aten.clamp_min.default
aten.clone.default aten.col2im.default aten.complex.default aten.concat.default aten.conj_physical.default aten.constant_pad_nd.default
aten.contiguous.default aten.conv1d.default aten.conv1d.padding aten.conv2d.default aten.conv2d.padding aten.conv3d.default
aten.conv3d.padding aten.conv_transpose1d.default aten.conv_transpose2d.input aten.conv_transpose3d.input aten.convolution.default
aten.copy.default aten.copysign.Scalar aten.copysign.Tensor aten.cos.default aten.cosh.default aten.cross_entropy_loss.default
aten.cummax.default aten.cummin.default aten.cumprod.default aten.cumsum.default aten.detach.default aten.diag_embed.default
aten.diagonal.default aten.diagonal_copy.default aten.digamma.default aten.div.Scalar aten.div.Scalar_mode aten.div.Tensor
aten.div.Tensor_mode aten.dot.default aten.dropout.default aten.einsum.default aten.elu.default aten.embedding.default
aten.empty.memory_format aten.empty_like.default aten.eq.Scalar aten.eq.Tensor aten.erf.default aten.erfc.default aten.erfinv.default
aten.exp.default aten.exp2.default aten.expand.default aten.expand_copy.default aten.expm1.default aten.fill.Scalar aten.fill.Tensor
aten.flatten.using_ints aten.flip.default aten.floor.default aten.floor_divide.Scalar aten.floor_divide.default aten.fmod.Scalar
aten.fmod.Tensor aten.full.default aten.full_like.default aten.gather.default aten.ge.Scalar aten.ge.Tensor aten.gelu.default
aten.grid_sampler.default aten.grid_sampler_2d.default aten.group_norm.default aten.gt.Scalar aten.gt.Tensor aten.hardsigmoid.default
aten.hardswish.default aten.hardtanh.default aten.huber_loss.default aten.hypot.default aten.i0.default aten.im2col.default
aten.imag.default aten.index.Tensor aten.index_add.default aten.index_copy.default aten.index_fill.int_Scalar aten.index_fill.int_Tensor
aten.index_put.default aten.index_select.default aten.instance_norm.default aten.inverse.default aten.isfinite.default aten.isinf.default
aten.isnan.default aten.kl_div.default aten.kthvalue.default aten.l1_loss.default aten.layer_norm.default aten.le.Scalar aten.le.Tensor
aten.leaky_relu.default aten.lerp.Scalar aten.lerp.Tensor aten.lgamma.default aten.lift_fresh_copy.default aten.linalg_cholesky.default
aten.linalg_cholesky_ex.default aten.linalg_det.default aten.linalg_householder_product.default aten.linalg_inv.default
aten.linalg_inv_ex.default aten.linalg_matrix_exp.default aten.linalg_solve.default aten.linalg_solve_triangular.default
aten.linalg_vector_norm.default aten.linear.default aten.linspace.default aten.log.default aten.log10.default aten.log1p.default
aten.log2.default aten.log_sigmoid.default aten.log_softmax.int aten.logcumsumexp.default aten.logical_and.default
aten.logical_not.default aten.logical_or.default aten.logical_xor.default aten.logsumexp.default aten.lt.Scalar aten.lt.Tensor
aten.masked_fill.Scalar aten.masked_fill.Tensor aten.masked_scatter.default aten.matmul.default aten.max.default aten.max.dim
aten.max_pool1d.default aten.max_pool2d.default aten.max_pool2d_with_indices.default aten.max_pool3d.default
aten.max_pool3d_with_indices.default aten.maximum.default aten.mean.default aten.mean.dim aten.median.default aten.median.dim
aten.min.default aten.min.dim aten.minimum.default aten.mish.default aten.mm.default aten.mse_loss.default aten.mul.Scalar aten.mul.Tensor
aten.mv.default aten.nanmedian.default aten.nanmedian.dim aten.narrow.default aten.native_channel_shuffle.default
aten.native_dropout.default aten.native_layer_norm.default aten.ne.Scalar aten.ne.Tensor aten.neg.default aten.new_empty.default
aten.new_full.default aten.new_ones.default aten.new_zeros.default aten.nll_loss.default aten.nll_loss2d.default aten.nll_loss_nd.default
aten.norm.ScalarOpt_dim aten.numpy_T.default aten.one_hot.default aten.ones.default aten.ones_like.default aten.pad.default
aten.permute.default aten.pixel_shuffle.default aten.pixel_unshuffle.default aten.polar.default aten.polygamma.default aten.pow.Scalar
aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.prelu.default aten.prod.default aten.prod.dim_int aten.real.default
aten.reciprocal.default aten.reflection_pad1d.default aten.reflection_pad2d.default aten.reflection_pad3d.default aten.relu.default
aten.relu6.default aten.remainder.Scalar aten.remainder.Tensor aten.repeat.default aten.repeat_interleave.self_int
aten.replication_pad1d.default aten.replication_pad2d.default aten.replication_pad3d.default aten.reshape.default aten.rms_norm.default
aten.roll.default aten.round.decimals aten.round.default aten.rsqrt.default aten.rsub.Scalar aten.rsub.Tensor aten.scalar_tensor.default
aten.scaled_dot_product_attention.default aten.scatter.reduce aten.scatter.src aten.scatter.value aten.scatter.value_reduce
aten.scatter_add.default aten.scatter_reduce.two aten.searchsorted.Tensor aten.select.int aten.select_scatter.default aten.selu.default
aten.sigmoid.default aten.sign.default aten.silu.default aten.sin.default aten.sinh.default aten.slice.Tensor aten.slice_scatter.default
aten.smooth_l1_loss.default aten.softmax.int aten.softplus.default aten.sort.default aten.sort.stable aten.special_erfcx.default
aten.special_i0.default aten.special_i0e.default aten.special_i1.default aten.special_i1e.default aten.split.Tensor aten.split.sizes
aten.split_with_sizes.default aten.split_with_sizes_copy.default aten.sqrt.default aten.square.default aten.squeeze.default
aten.squeeze.dim aten.squeeze.dims aten.stack.default aten.std.correction aten.std.dim aten.sub.Scalar aten.sub.Tensor aten.sum.default
aten.sum.dim_IntList aten.sym_constrain_range_for_size.default aten.sym_size.int aten.t.default aten.tan.default aten.tanh.default
aten.to.device aten.to.dtype aten.to.dtype_layout aten.to.other aten.topk.default aten.transpose.int aten.tril.default aten.triu.default
aten.true_divide.Scalar aten.true_divide.Tensor aten.trunc.default aten.type_as.default aten.unbind.int aten.unflatten.int
aten.unfold.default aten.unfold_copy.default aten.unsqueeze.default aten.upsample_bicubic2d.default aten.upsample_bicubic2d.vec
aten.upsample_bilinear2d.default aten.upsample_bilinear2d.vec aten.upsample_linear1d.default aten.upsample_linear1d.vec
aten.upsample_nearest1d.default aten.upsample_nearest1d.vec aten.upsample_nearest2d.default aten.upsample_nearest2d.vec
aten.upsample_nearest3d.default aten.upsample_nearest3d.vec aten.upsample_trilinear3d.default aten.upsample_trilinear3d.vec
aten.var.correction aten.var.dim aten.var_mean.correction aten.view.default aten.view_as_complex.default aten.view_as_real.default
aten.view_copy.default aten.where.Scalar aten.where.ScalarOther aten.where.ScalarSelf aten.where.self aten.zeros.default
aten.zeros_like.default crosstrain.gru.default crosstrain.lstm.default crosstrain.rnn.default python.add python.eq python.floordiv
python.ge python.gt python.le python.lt python.mod python.mul python.ne python.neg python.sub python.sym_float python.truediv
"""
TRANSLATED = frozenset(_NAMES.split())
