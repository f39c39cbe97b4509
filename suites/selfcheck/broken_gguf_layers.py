"""Planted faults of layers that own shards, of kv_b and of names: a right implementation with one thing wrong each."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_conformance.reference import fused_linear
from mla_conformance.reference.gguf import FORMATS, dequantize
from mla_conformance.suites.harness.gguf_layer_cases import Arrival, Forward, KvBCase, LinearCase, NamesCase
from mla_conformance.suites.harness.implementations import kernels
from mla_conformance.suites.harness.problems import GGUFLinearProblem
from mla_conformance.suites.selfcheck.broken import Broken


class LoadsOtherwise(Broken):
    """Loads another layer, or other arrivals, than it was given."""

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Right, for another case."""
        problem = self.change_problem(case.problem)
        arrivals = self.change_arrivals(case.arrivals, problem)
        return super().gguf_linear(dataclasses.replace(case, problem=problem, arrivals=arrivals))

    def change_problem(self, problem: GGUFLinearProblem) -> GGUFLinearProblem:
        """Return the problem that it loads."""
        return problem

    def change_arrivals(self, arrivals: list[Arrival], problem: GGUFLinearProblem) -> list[Arrival]:
        """Return the arrivals that it believes in."""
        return arrivals


class OrderOfArrival(LoadsOtherwise):
    """Stacks shards as they arrive (vllm-project/vllm#41057)."""

    name = "order-of-arrival"

    def change_problem(self, problem: GGUFLinearProblem) -> GGUFLinearProblem:
        return problem.replace(shards=tuple(problem.shards[i] for i in problem.arrivals), arrival=())

    def change_arrivals(self, arrivals: list[Arrival], problem: GGUFLinearProblem) -> list[Arrival]:
        return [dataclasses.replace(arrival, shard_id=i) for i, arrival in enumerate(arrivals)]


class TypeOfTheFirstArrival(LoadsOtherwise):
    """Decodes every shard as the type of the first that arrives."""

    name = "type-of-the-first-arrival"

    def change_arrivals(self, arrivals: list[Arrival], problem: GGUFLinearProblem) -> list[Arrival]:
        return [dataclasses.replace(arrival, quant=arrivals[0].quant) for arrival in arrivals]


class RefusesPlainShards(LoadsOtherwise):
    """Refuses a shard that is not quantised beside one that is."""

    name = "refuses-plain-shards"

    def change_arrivals(self, arrivals: list[Arrival], problem: GGUFLinearProblem) -> list[Arrival]:
        if len({arrival.quant in ("F16", "BF16", "F32") for arrival in arrivals}) > 1:
            raise ValueError("all shards of a layer must be quantised")
        return arrivals


class RefusesFusedTensors(LoadsOtherwise):
    """Refuses a tensor that holds all shards."""

    name = "refuses-fused-tensors"

    def change_arrivals(self, arrivals: list[Arrival], problem: GGUFLinearProblem) -> list[Arrival]:
        if any(arrival.shard_id is None for arrival in arrivals):
            raise ValueError("a shard id is needed")
        return arrivals


class SliceOfRankZero(LoadsOtherwise):
    """Every rank loads the slice of the first."""

    name = "slice-of-rank-zero"

    def change_problem(self, problem: GGUFLinearProblem) -> GGUFLinearProblem:
        return problem.replace(tp_rank=0)


class IgnoresDisableTp(LoadsOtherwise):
    """Slices a layer that has disable_tp."""

    name = "ignores-disable-tp"

    def change_problem(self, problem: GGUFLinearProblem) -> GGUFLinearProblem:
        return problem.replace(disable_tp=False)


class SlicesReplicatedLayers(LoadsOtherwise):
    """Slices a replicated layer by rows."""

    name = "slices-replicated-layers"

    def change_problem(self, problem: GGUFLinearProblem) -> GGUFLinearProblem:
        return problem.replace(layer="column") if problem.layer == "replicated" else problem


class OverwritesDoubledShards(LoadsOtherwise):
    """Of shards with one id the last counts, without a word."""

    name = "overwrites-doubled-shards"

    def change_arrivals(self, arrivals: list[Arrival], problem: GGUFLinearProblem) -> list[Arrival]:
        return list({arrival.shard_id: arrival for arrival in arrivals}.values())


class AcceptsTuples(LoadsOtherwise):
    """Takes a tensor with a tuple of ids for all shards."""

    name = "accepts-tuples"

    def change_arrivals(self, arrivals: list[Arrival], problem: GGUFLinearProblem) -> list[Arrival]:
        return [
            dataclasses.replace(arrival, shard_id=None) if isinstance(arrival.shard_id, tuple) else arrival
            for arrival in arrivals
        ]


class IgnoresUnknownShards(LoadsOtherwise):
    """Leaves out a shard that the layer does not have, without a word."""

    name = "ignores-unknown-shards"

    def change_arrivals(self, arrivals: list[Arrival], problem: GGUFLinearProblem) -> list[Arrival]:
        return [arrival for arrival in arrivals if arrival.shard_id in (*range(len(problem.shards)), None)]


class AssertsInsteadOfRefusing(Broken):
    """Meets faulty shards with an assertion, which names nothing and may be switched off."""

    name = "asserts-instead-of-refusing"

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Right where nothing is refused."""
        try:
            return super().gguf_linear(case)
        except ValueError as error:
            raise AssertionError from error


class FindsMissingShardsInTheForward(Broken):
    """Loads whatever comes; the first forward raises."""

    name = "finds-missing-shards-in-the-forward"

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Right where nothing is refused."""
        try:
            return super().gguf_linear(case)
        except ValueError as error:
            refusal = error

        def forward(x: Tensor) -> Tensor:
            raise refusal

        return forward


class CutsBlocks(Broken):
    """A rank of a row-parallel layer takes its part of a row's bytes, wherever blocks begin."""

    name = "cuts-blocks"

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Right where the part begins at a block."""
        problem, arrival = case.problem, case.arrivals[0]
        form, row_bytes = FORMATS[arrival.quant], arrival.data.shape[1]
        start = problem.rank * row_bytes // problem.degree
        size = -(-problem.local_columns // form.block_elements) * form.block_bytes
        part = torch.nn.functional.pad(arrival.data, (0, size))[:, start : start + size]
        weight = dequantize(part, arrival.quant)[:, : problem.local_columns]
        return lambda x: fused_linear.linear(x, weight).to(x.dtype)


class RefusesWithoutNumbers(Broken):
    """Refuses a slice that cuts a block, and does not say which."""

    name = "refuses-without-numbers"

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Right where slices are whole blocks."""
        if case.problem.local_columns % FORMATS[case.arrivals[0].quant].block_elements:
            raise ValueError("tensor parallelism is not supported for this layer")
        return super().gguf_linear(case)


class ColumnsUpTo4096(Broken):
    """In-features beyond 4096 are left out of the sum."""

    name = "columns-up-to-4096"

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Right for layers of most smaller models."""
        forward = super().gguf_linear(case)
        return lambda x: forward(torch.where(torch.arange(x.shape[-1]) < 4096, x, 0.0))


class ValuesBeforeKeys(Broken):
    """Takes the first rows of a head of kv_b for its values."""

    name = "values-before-keys"

    def gguf_kv_b(self, case: KvBCase) -> tuple[Tensor, Tensor]:
        """Right for the split form."""
        problem = case.problem
        if problem.form == "split":
            return super().gguf_kv_b(case)
        kv_b = dequantize(case.tensors[0], problem.quants[0]).to(getattr(torch, problem.dtype))
        per_head = kv_b.view(problem.heads, -1, problem.kv_lora_rank)
        return per_head[:, problem.v_head_dim :], per_head[:, : problem.v_head_dim].transpose(1, 2)


class KeysNotTransposed(Broken):
    """Reads k_b as if it lay as kv_b does, nope rows of the latent's width."""

    name = "keys-not-transposed"

    def gguf_kv_b(self, case: KvBCase) -> tuple[Tensor, Tensor]:
        """Right for the fused form."""
        w_uk, w_uv = super().gguf_kv_b(case)
        if case.problem.form == "split":
            w_uk = w_uk.transpose(1, 2).reshape(w_uk.shape)
        return w_uk, w_uv


class KvBRoundedTwice(Broken):
    """Rounds to float16 on the way to bfloat16."""

    name = "kv-b-rounded-twice"

    def gguf_kv_b(self, case: KvBCase) -> tuple[Tensor, Tensor]:
        """Right for float16."""
        w_uk, w_uv = super().gguf_kv_b(dataclasses.replace(case, problem=case.problem.replace(dtype="float16")))
        dtype = getattr(torch, case.problem.dtype)
        return w_uk.to(dtype), w_uv.to(dtype)


class Names(kernels.Adapter):
    """Maps names rightly; each subclass below breaks one thing."""

    compiles_kernels = False


class DropsKeys(Names):
    """Maps attn_v_b, and has no place for attn_k_b (ggml-org/llama.cpp#13094)."""

    name = "drops-keys"

    def gguf_names(self, case: NamesCase) -> dict[str, list[str]]:
        """Right for a fused kv_b."""
        return {name: filled for name, filled in super().gguf_names(case).items() if "attn_k_b" not in name}


class DropsThePredictor(Names):
    """Has no place for the multi-token predictor, the layer behind the last."""

    name = "drops-the-predictor"

    def gguf_names(self, case: NamesCase) -> dict[str, list[str]]:
        """Right without one."""
        predictor = f"blk.{case.model.config['num_hidden_layers']}."
        return {name: filled for name, filled in super().gguf_names(case).items() if not name.startswith(predictor)}


class InventsAnExpert(Names):
    """Counts the experts of each layer from 0 to their number, both included."""

    name = "invents-an-expert"

    def gguf_names(self, case: NamesCase) -> dict[str, list[str]]:
        """One parameter too many for each tensor of experts."""
        last = f"experts.{case.model.config['n_routed_experts'] - 1}."
        beyond = f"experts.{case.model.config['n_routed_experts']}."
        return {
            name: filled + [parameter.replace(last, beyond) for parameter in filled if last in parameter]
            for name, filled in super().gguf_names(case).items()
        }


class ForgetsAnExpert(Names):
    """Leaves the last expert of each layer out."""

    name = "forgets-an-expert"

    def gguf_names(self, case: NamesCase) -> dict[str, list[str]]:
        """One parameter too few for each tensor of experts."""
        last = f"experts.{case.model.config['n_routed_experts'] - 1}."
        return {
            name: [parameter for parameter in filled if last not in parameter]
            for name, filled in super().gguf_names(case).items()
        }
