"""Puts an engine together: model, arena, pool, scheduler, runner. The engine's composition root."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import msgspec
import torch
from memd_kernels.formats import PackedFormat

from memd.arena.arena import PageShape
from memd.arena.driver import ArenaDriver
from memd.automatic import (
    defrag_pages_per_step,
    disk_expensive_tokens,
    host_limit_bytes,
    max_batch_tokens,
    page_tokens_for,
    reclaim_pages_per_step,
    reserve_bytes,
)
from memd.config import Settings, build, flatten
from memd.engine.attention_shares import AttentionShares
from memd.engine.bounds import bound_sequences
from memd.engine.commands import Commands
from memd.engine.device import (
    allocator_bytes,
    choose_copier,
    choose_device,
    choose_driver,
    choose_dtype,
    free_memory_bytes,
    gpu_facts,
    launch_table,
    load_launch_table,
    shortage,
    use_threads,
)
from memd.engine.device_mover import DeviceMover
from memd.engine.disk import open_disk, staging_pages
from memd.engine.elastic_build import build_elasticity, reserve_range
from memd.engine.elasticity import NOT_ELASTIC
from memd.engine.engine import Engine
from memd.engine.faults import FaultyRunner, with_faults
from memd.engine.invariant import batch_invariant
from memd.engine.limits import SchedulerLimits, longest_request, scheduler_limits
from memd.engine.messages import Loading, Ready, Start
from memd.engine.packing_build import (
    build_packing,
    choose_format,
    kv_namespace,
    packed_view,
    packing_schedule,
    table_entries,
)
from memd.engine.packing_errors import PackingErrors
from memd.engine.port import EnginePort, Pulse
from memd.engine.prefix_groups import PrefixGrouper
from memd.engine.runner import Forward, PlanRunner, Runner
from memd.engine.sampling import Vocabulary
from memd.engine.scheduler import Scheduler
from memd.engine.slots import Slots
from memd.engine.warm_up import warm_up
from memd.errors import OutOfDeviceMemory
from memd.faults import Faults
from memd.machine import free_host_bytes
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.head_plan import head_plan_for, weight_files
from memd.models.hub import ModelFiles, read_config, resolve
from memd.models.rope import MAX_POSITION, stretched
from memd.models.shared_heads import share_heads
from memd.models.spans import narrowed
from memd.pool.layout import KVLayout, plan_layout
from memd.pool.pool import Pool
from memd.pool.watermarks import Watermarks
from memd.pool_size import limit_pages
from memd.tiers.copier import Copier
from memd.tiers.disk import Disk, DiskThreads

logger = logging.getLogger(__name__)


def load_engine(port: EnginePort, start: Start) -> tuple[Engine, Ready]:
    """Load the model named in the settings and build an engine for it; reports progress on the
    port.

    Raises:
        ModelError: the model cannot be found, read or served.
        SettingsError: settings do not fit the device.
        OutOfDeviceMemory: the weights do not fit, or the pool's address range cannot be had.
    """
    settings = build(flatten(start.settings))
    device = choose_device(settings)
    use_threads(settings, device)
    port.send(Loading("finding the model", 0.0))
    load_launch_table(device)
    files = resolve(settings.model.path)
    model = stretched(read_config(files), settings.model.max_len)
    model = narrowed(model, settings.kv.window, settings.kv.sinks)
    plan = head_plan_for(settings.model.shared_heads, files, model)
    dtype = choose_dtype(settings, model, device)
    free_bytes = free_memory_bytes(device)
    try:
        tensors = load_tensors(
            files, model, dtype, device, lambda done: port.send(Loading("loading weights", done))
        )
        weights = fingerprint(files, model)
        if plan is not None:
            model = share_heads(tensors, model, plan)
            weights = f"{weights}-{plan.digest}"
        decoder = Decoder(model, tensors, device, Pulse(port).beat)
        del tensors
        port.send(Loading("warming up", 0.0))
        engine, ready = assemble_engine(
            port, start, settings, model, decoder.forward, device, dtype, weights
        )
    except torch.OutOfMemoryError:
        needed_bytes = sum(path.stat().st_size for path in weight_files(files))
        raise OutOfDeviceMemory(shortage(device, needed_bytes, free_bytes)) from None
    port.send(Loading("warming up", 1.0))
    shared = None if plan is None else plan.summary()
    return engine, msgspec.structs.replace(ready, model={**ready.model, "shared_heads": shared})


def assemble_engine(
    port: EnginePort,
    start: Start,
    settings: Settings,
    model: ModelConfig,
    forward: Forward,
    device: torch.device,
    dtype: torch.dtype,
    model_fingerprint: str,
    driver: ArenaDriver | None = None,
    copier: Copier | None = None,
    disk: Disk | None = None,
    clock: Callable[[], float] = time.monotonic,
    steps_ahead: int | None = None,
) -> tuple[Engine, Ready]:
    """Build an engine around a model that is already there.

    Args:
        forward: See `memd.engine.runner.Forward`.
        model_fingerprint: Part of every namespace: other weights never share pages.
        driver: Of the arena; default: the one for the device. With `debug.faults` on, this, the
            copier, the disk, the clock and the runner do what they are told to.
        copier: Between device and host; default: the one for the device.
        disk: Reads and writes page files; default: threads that do.
        clock: Monotonic seconds.
        steps_ahead: Steps launched before the results of the first are read; default: 1 on a
            device that works beside the host, else 0.
    """
    invariant = settings.engine.batch_invariant
    forward = batch_invariant(forward, invariant, device)
    # Nothing else is there yet.
    weights_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    driver = driver or choose_driver(device)
    copier = copier or choose_copier(device)
    disk = disk or DiskThreads()
    faults = Faults() if settings.debug.faults else None
    if faults is not None:
        driver, copier, disk, clock = with_faults(faults, driver, copier, disk, clock)
    form = choose_format(settings, model, device)
    layout = _layout(settings, model, form, device, dtype, driver.granule_bytes)
    base_bytes = free_memory_bytes(device)
    sizes = layout.page_tokens, layout.page_bytes, layout.block_bytes
    capacity = limit_pages(settings.memory.limit, base_bytes, *sizes)
    arena, most_pages = reserve_range(driver, layout, capacity, device)
    shape = PageShape(layout.num_layers, layout.num_kv_heads, layout.page_tokens, layout.head_dim)
    kv = arena.kv(shape, layout.pages_per_block, dtype)
    packed = packed_view(arena.bytes(), form, layout)
    vocabulary = Vocabulary(
        min(start.sampling_vocab_size, model.vocab_size), frozenset(start.eos_token_ids)
    )
    host = settings.memory.host.limit
    host_bytes = host_limit_bytes(device.type) if host == "auto" else host
    # Room for a higher limit later; memory is taken only for what is written.
    max_host_pages = max(host_bytes, free_host_bytes()) // layout.page_bytes
    staging = staging_pages(settings.memory.disk, layout)
    marks = settings.memory.watermark
    pool = Pool(
        layout,
        capacity,
        arena,
        Watermarks(marks.high, marks.low),
        clock,
        settings.memory.regret_window,
        max_host_pages,
    )
    pool.host_limit_bytes = host_bytes
    bound_sequences(pool, model, settings.kv)
    pool.packing = packing_schedule(settings.kv, form)
    pool.pins.limit_ratio = settings.memory.pin_limit
    automatic = {
        "memory.host.limit": host_limit_bytes(device.type),
        "memory.disk.expensive_tokens": disk_expensive_tokens(device.type),
        "engine.max_batch_tokens": max_batch_tokens(device.type, invariant),
        "memory.reclaim_pages_per_step": reclaim_pages_per_step(capacity),
        "memory.defrag.pages_per_step": defrag_pages_per_step(device.type, layout.page_bytes),
        "memory.elastic.reserve": reserve_bytes(device.type),
    }
    limits = scheduler_limits(settings, automatic)
    max_model_len = _max_model_len(settings, model, pool, most_pages)
    scheduler = Scheduler(pool, limits, max_model_len, clock)
    errors = PackingErrors()
    warm_up(forward, layout, form, device, dtype)
    packing = build_packing(forward, model, form, dtype, device, pool, scheduler, errors)
    table_pages = pool.retention.most_listed_pages(max_model_len)
    entries = table_entries(pool)
    slots = Slots(limits.max_sequences, table_pages, layout.page_tokens, device, entries)
    mover = DeviceMover(kv, packed, layout, errors)
    mover.warm_up()
    shares = AttentionShares(slots) if pool.retention.measures_shares else None
    # Behind a window the prefix is not read at all; what is read for several has no shares.
    grouped = shares is None and not invariant and not any(model.windows)
    make_runner = partial(
        Runner,
        kv=kv,
        packed=packed,
        mover=mover,
        layout=layout,
        vocabulary=vocabulary,
        slots=slots,
        steps_ahead=int(device.type == "cuda") if steps_ahead is None else steps_ahead,
        grouper=PrefixGrouper(pool.pages.refs, layout.page_tokens) if grouped else None,
        shares=shares,
    )
    runner: PlanRunner
    graphs_bytes = 0
    if faults is not None:
        runner = FaultyRunner(faults, pool, kv, packed, forward, make_runner)
    else:
        runner = plain = make_runner(forward)
        if device.type == "cuda":
            graphs_bytes = _capture(plain, limits, weights_bytes, port, device)
    pool.mover = runner
    copier.open(arena.bytes(), layout, max_host_pages + staging)
    namespace = f"{model_fingerprint}/{dtype}/{layout.page_tokens}{kv_namespace(settings.kv)}"
    namespace += "/batch-invariant" if invariant else ""
    expensive = settings.memory.disk.expensive_tokens
    if expensive == "auto":
        expensive = automatic["memory.disk.expensive_tokens"]
    open_disk(settings.memory.disk, pool, disk, copier, namespace, expensive, form)
    elasticity = build_elasticity(
        settings, automatic, pool, scheduler, driver, most_pages, base_bytes, device, clock
    )
    commands = Commands(pool, scheduler, elasticity, start.revision, automatic, namespace, faults)
    commands.tenancy.configured = [tenant.model_dump() for tenant in settings.tenants]
    stage = torch.cuda.nvtx.range if device.type == "cuda" else nullcontext
    engine = Engine(
        port,
        pool,
        scheduler,
        runner,
        copier,
        disk,
        clock,
        namespace,
        commands,
        elasticity,
        packing,
        stage,
        partial(allocator_bytes, device),
    )
    max_model_len = longest_request(max_model_len, pool)
    ready = _ready(model, model_fingerprint, layout, pool, driver, device, dtype, max_model_len)
    ready.pool["limit_base_bytes"] = base_bytes
    ready.pool["most_pages"] = most_pages
    gpu = gpu_facts(device, weights_bytes, graphs_bytes, pool_in_allocator=not driver.elastic)
    return engine, msgspec.structs.replace(ready, gpu=gpu)


def _capture(
    runner: Runner,
    limits: SchedulerLimits,
    weights_bytes: int,
    port: EnginePort,
    device: torch.device,
) -> int:
    """Capture steps as graphs; where the device has no room for them, steps run as eager passes.

    Returns:
        Bytes that the graphs took.
    """
    before_bytes = allocator_bytes(device) or 0
    try:
        runner.capture(
            limits.max_sequences,
            limits.max_batch_tokens,
            weights_bytes,
            lambda done: port.send(Loading("capturing graphs", done)),
        )
    except torch.OutOfMemoryError as error:
        logger.warning(
            "steps run without graphs, several times slower for few sequences: %s", error
        )
    return (allocator_bytes(device) or 0) - before_bytes


def fingerprint(files: ModelFiles, model: ModelConfig) -> str:
    """Identifies weights by configuration and by name, size and time of their files."""
    digest = hashlib.blake2b(json.dumps(asdict(model), sort_keys=True).encode(), digest_size=8)
    for path in weight_files(files):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _layout(
    settings: Settings,
    model: ModelConfig,
    form: PackedFormat | None,
    device: torch.device,
    dtype: torch.dtype,
    granule_bytes: int,
) -> KVLayout:
    page_tokens, packed_page_bytes = settings.memory.page_tokens, None
    if form is not None:
        page_tokens = form.page_tokens
        packed_page_bytes = form.page_bytes(model.num_layers, model.num_kv_heads)
    elif page_tokens == "auto":
        page_tokens = page_tokens_for(device.type, packed=False)
    return plan_layout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        element_bytes=dtype.itemsize,
        page_tokens=page_tokens,
        granule_bytes=granule_bytes,
        target_block_bytes=settings.memory.block_size,
        packed_page_bytes=packed_page_bytes,
    )


def _max_model_len(settings: Settings, model: ModelConfig, pool: Pool, most_pages: int) -> int:
    """Longest request that a limit of the pool could ever allow."""
    wanted, longest = settings.model.max_len, model.max_position
    window, sinks = pool.retention.window, pool.retention.sinks
    if wanted != "auto" and window is not None and window + sinks <= model.max_position:
        # Behind a window only distances within it count, not how long the text is.
        longest = max(longest, MAX_POSITION)
    longest = longest_request(longest, pool, most_pages)
    return longest if wanted == "auto" else min(longest, wanted)


def _ready(
    model: ModelConfig,
    model_fingerprint: str,
    layout: KVLayout,
    pool: Pool,
    driver: ArenaDriver,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
) -> Ready:
    return Ready(
        pid=os.getpid(),
        max_model_len=max_model_len,
        model={
            "architecture": model.architecture,
            "fingerprint": model_fingerprint,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "layers": model.num_layers,
            "heads": model.num_heads,
            "kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "vocab_size": model.vocab_size,
            "max_position": model.max_position,
        },
        launch_table=launch_table(device),
        pool={
            "page_tokens": layout.page_tokens,
            "page_bytes": layout.page_bytes,
            "token_bytes": layout.token_bytes,
            "block_bytes": layout.block_bytes,
            "pages_per_block": layout.pages_per_block,
            "block_waste_bytes": layout.waste_bytes,
            "packed_page_bytes": layout.size_bytes(True),
            "packed_pages_per_block": layout.packed_pages_per_block,
            "packed_block_waste_bytes": layout.block_bytes
            - (layout.packed_pages_per_block * layout.size_bytes(True) or layout.block_bytes),
            "capacity_pages": pool.capacity_pages,
            "capacity_blocks": pool.blocks.limit_blocks,
            "elastic": driver.elastic,
            "elastic_reason": None if driver.elastic else NOT_ELASTIC,
        },
    )
