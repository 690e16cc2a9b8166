"""`overlap doctor --measure`: what the device reaches alone, and whether work of known answer comes out right.

One worker without cases, in a process of its own; what goes wrong in it is a finding.
"""

from collections.abc import Iterator

from harness.child import Child
from harness.devices import Device
from harness.doctor import Finding
from harness.findings import control_value
from harness.labels import number, percent
from harness.machine import best_link, identity
from harness.profiles import Profile
from harness.protocol import CeilingsDone, Closing, ControlDone, Job, Ready
from harness.record import Ceiling
from harness.validity import link_words

# GB/s of one lane after line coding, by generation (PCI-SIG: 8b/10b, from gen3 128b/130b, gen6 in flits).
LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.56}

# Pinned copies reach 80 to 90 % of the link (stas00/ml-engineering: 88 % on an H200).
LINK_SHARE = 0.6


def measured(device: Device, profile: Profile) -> Iterator[Finding]:
    """Findings as they are measured; those of level `fail` say that overlap numbers here are not to be believed."""
    job = Job(
        device=device.kind,
        uuid=device.uuid,
        no_telemetry=device.reason,
        profile=profile,
        cases=[],
        launch=0,
        best_link=best_link(identity(device)),
    )
    try:
        child = Child(job)
    except OSError as error:
        yield _broken(f"no worker could be started: {error.strerror}")
        return
    done = False
    with child:
        for event in child.events():
            if isinstance(event, Ready):
                text = f"in {number(event.open_s)} s; an empty launch costs the host {number(event.canary_us)} us"
                yield Finding("device opened", "ok", text)
            elif isinstance(event, CeilingsDone):
                yield from _link(event.link, job.best_link)
                yield from (_ceiling(found, event.link) for found in event.ceilings)
            elif isinstance(event, ControlDone):
                yield _control(event)
            done = done or isinstance(event, Closing)
        reason = child.end()
    if not done:
        yield _broken(reason)


def _broken(reason: str) -> Finding:
    return Finding("device", "fail", f"measuring on it failed: {reason}", "see what `overlap run` says of it")


def _link(link: tuple[int, int] | None, best: tuple[int, int] | None) -> Iterator[Finding]:
    if link is None:
        return
    text = f"{link_words(link)} under load"
    if best is not None and (link[0] < best[0] or link[1] < best[1]):
        text += f", below its {link_words(best)}; cases would be invalid"
        yield Finding(
            "PCIe", "warn", text, "reseat the card, look for errors of the link (dmesg), or use another slot"
        )
    else:
        yield Finding("PCIe", "ok", text)


def _ceiling(found: Ceiling, link: tuple[int, int] | None) -> Finding:
    name = f"{found.name} alone"
    if found.value is None:
        return Finding(
            name, "warn", f"not measured: {found.detail}", "free memory on the device and the host"
        )
    text = f"{number(found.value)} {found.unit}"
    if found.low is not None and found.high is not None:
        text += f" ({number(found.low)} to {number(found.high)})"
    if found.name not in ("h2d", "d2h") or link is None or link[0] not in LANE_GB_S:
        return Finding(name, "ok", text)
    most = LANE_GB_S[link[0]] * link[1]
    text += f", {percent(found.value / most)} of the {number(most)} that {link_words(link)} carries"
    if found.value >= LINK_SHARE * most:
        return Finding(name, "ok", text)
    remedy = "run on the cores of the GPU's NUMA node (numactl), and see who else uses the link"
    return Finding(name, "warn", text, remedy)


def _control(event: ControlDone) -> Finding:
    control = event.control
    text = control_value(control)
    if control.passed:
        return Finding(f"control {control.name}", "ok", text)
    remedy = "measure on an idle machine; overlap numbers from here are not to be believed while this fails"
    return Finding(f"control {control.name}", "fail", text, remedy)
