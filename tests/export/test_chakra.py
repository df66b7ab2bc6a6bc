"""Chakra traces, decoded by Google's protobuf from the fields of et_def.proto."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emulator.cost.kernel import Slice, Timeline
from emulator.export.chakra import write_chakra

from .timelines import GATHER, LINEAR, US, hand_run

descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
from google.protobuf import descriptor_pool, message_factory  # noqa: E402

KINDS = {"string": 9, "uint64": 4, "int64": 3, "bool": 8, "enum": 14, "message": 11, "double": 1, "int32": 5}
# field numbers and types of MLCommons' schema/protobuf/et_def.proto, as far as a reader of these files needs them
MESSAGES: dict[str, list[tuple[str, int, str, str]]] = {
    "AttributeProto": [
        ("name", 1, "string", ""), ("doc_string", 2, "string", ""), ("double_val", 3, "double", "value"),
        ("int32_val", 7, "int32", "value"), ("int64_val", 9, "int64", "value"), ("uint64_val", 13, "uint64", "value"),
        ("bool_val", 27, "bool", "value"), ("string_val", 29, "string", "value"),
    ],
    "GlobalMetadata": [("version", 1, "string", ""), ("attr", 2, "*AttributeProto", "")],
    "IOInfo": [("values", 1, "string", ""), ("shapes", 2, "string", ""), ("types", 3, "string", "")],
    "Node": [
        ("id", 1, "uint64", ""), ("name", 2, "string", ""), ("type", 3, "NodeType", ""),
        ("ctrl_deps", 4, "*uint64", ""),
        ("data_deps", 5, "*uint64", ""), ("start_time_micros", 6, "uint64", ""), ("duration_micros", 7, "uint64", ""),
        ("inputs", 8, "IOInfo", ""), ("outputs", 9, "IOInfo", ""), ("attr", 10, "*AttributeProto", ""),
    ],
}  # fmt: skip
NODE_TYPES = {"INVALID_NODE": 0, "COMP_NODE": 4, "COMM_SEND_NODE": 5, "COMM_RECV_NODE": 6, "COMM_COLL_NODE": 7}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="ChakraProtoMsg", syntax="proto3")
    enum = file.enum_type.add(name="NodeType")
    for name, value in NODE_TYPES.items():
        enum.value.add(name=name, number=value)
    for message, fields in MESSAGES.items():
        made = file.message_type.add(name=message)
        for name, tag, kind, oneof in fields:
            field = made.field.add(name=name, number=tag, label=3 if kind.startswith("*") else 1)
            kind = kind.removeprefix("*")
            field.type = KINDS.get(kind, KINDS["enum"] if kind == "NodeType" else KINDS["message"])
            if kind not in KINDS:
                field.type_name = f".ChakraProtoMsg.{kind}"
            if oneof:
                if not made.oneof_decl:
                    made.oneof_decl.add(name=oneof)
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in MESSAGES
    }


def messages(raw: bytes) -> Iterator[bytes]:
    """The parts of a length-delimited stream."""
    while raw:
        size = shift = place = 0
        while True:
            byte = raw[place]
            size |= (byte & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if not byte & 0x80:
                break
        assert len(raw) >= place + size, "the last message is cut short"
        yield raw[place : place + size]
        raw = raw[place + size :]


def read(path: Path, schema: dict[str, Any]) -> tuple[Any, list[Any]]:
    head, *rest = messages(path.read_bytes())
    nodes = [schema["Node"].FromString(raw) for raw in rest]
    for node in nodes:  # a field that et_def.proto lacks would be kept, and come out again
        known = schema["Node"]()
        known.CopyFrom(node)
        known.DiscardUnknownFields()
        assert known.SerializeToString() == node.SerializeToString()
    return schema["GlobalMetadata"].FromString(head), nodes


def attributes(message: Any) -> dict[str, Any]:
    return {a.name: getattr(a, a.WhichOneof("value")) for a in message.attr}


def kinds(message: Any) -> dict[str, str]:
    return {a.name: a.WhichOneof("value") for a in message.attr}


def test_nodes_of_a_rank(tmp_path: Path, schema: dict[str, Any]) -> None:
    paths = write_chakra(hand_run(), tmp_path)
    assert [p.name for p in paths] == ["by hand.0.et", "by hand.1.et"]
    head, (linear, gather, attention, later) = read(paths[0], schema)
    assert head.version == "0.0.4"
    assert attributes(head)["rank"] == "0"
    assert attributes(head)["times"].startswith("predicted for Ascend 910C")
    assert [node.id for node in (linear, gather, attention, later)] == [1, 2, 3, 4]
    assert [node.type for node in (linear, gather, attention, later)] == [4, 7, 4, 4]
    assert [list(node.data_deps) for node in (linear, gather, attention, later)] == [[], [1], [1, 2], [3]]
    assert [node.start_time_micros for node in (linear, gather, attention, later)] == [0, 16, 21, 29]
    assert [node.duration_micros for node in (linear, gather, attention, later)] == [10, 5, 8, 4]
    assert linear.name == "model.layers.0.mlp.gate.linear_1"
    assert json.loads(linear.inputs.shapes) == [[4, 8], [6, 8]]
    assert json.loads(linear.outputs.types) == ["Tensor(bfloat16)"]


def test_attributes_have_the_types_that_the_feeder_reads(tmp_path: Path, schema: dict[str, Any]) -> None:
    # ETFeederNode of MLCommons' chakra: bool is_cpu_op; int64 num_ops, comm_type, comm_size; uint64 tensor_size
    _, (linear, gather, attention, _) = read(write_chakra(hand_run(), tmp_path)[1], schema)
    found, typed = attributes(gather), kinds(gather)
    assert found["comm_type"] == 2  # ALL_GATHER
    assert found["comm_size"] == 4 * 6 * 2  # bytes of the input, bfloat16
    assert found["pg_name"] == "1"
    assert (typed["is_cpu_op"], typed["comm_type"], typed["comm_size"]) == ("bool_val", "int64_val", "int64_val")
    assert found["is_cpu_op"] is False
    assert json.loads((tmp_path / "comm_group.json").read_text()) == {"1": [0, 1]}
    found, typed = attributes(linear), kinds(linear)
    assert (found["num_ops"], found["tensor_size"]) == (384, 224)
    assert (typed["num_ops"], typed["tensor_size"]) == ("int64_val", "uint64_val")
    assert attributes(attention)["num_ops"] == 1192
    assert found["module"] == "model.layers.0.mlp.gate"


def test_what_runs_side_by_side_stays_so(tmp_path: Path, schema: dict[str, Any]) -> None:
    # a gather from 2 to 20 beside linears of 0 to 10 and 10 to 15; the last linear starts at 20
    def piece(stream: str, start: float, end: float, index: int) -> Slice:
        record = GATHER if stream == "comm" else LINEAR
        return Slice(0, stream, start * US, (end - start) * US, 0.0, record, index)  # type: ignore[arg-type]

    own = (
        piece("compute", 0, 10, 0),
        piece("comm", 2, 20, 1),
        piece("compute", 10, 15, 2),
        piece("compute", 20, 24, 3),
    )
    run = replace(hand_run(), timelines=(Timeline(0, "hand", 24 * US, (own, ())),))
    _, nodes = read(write_chakra(run, tmp_path)[0], schema)
    assert [list(node.data_deps) for node in nodes] == [[], [], [1], [2, 3]]
