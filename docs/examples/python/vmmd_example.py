#!/usr/bin/env python3
"""Creates a VM, watches it until it runs, talks to its serial console, and deletes it.

The messages are made from the protocol files, here or from the package's /usr/share/vmmd/proto:

    python3 -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python -m grpc_tools.protoc -I ../../../proto --python_out=. --grpc_python_out=. \
        $(cd ../../../proto && ls vmmd/v1/*.proto)
    venv/bin/python vmmd_example.py --socket /run/vmmd/vmmd.sock --kernel /boot/vmlinuz example

Over TCP, with certificates as `vmmd init-certs` makes them:

    venv/bin/python vmmd_example.py --address node-1:7443 --ca ca.crt --cert admin.crt --key admin.key …
"""

import argparse
import queue
import sys
import time
import uuid

import grpc
from google.rpc import error_details_pb2, status_pb2
from vmmd.v1 import meta_pb2, vm_pb2, vm_pb2_grpc

# Time for a restart of the daemon, in seconds.
PATIENCE = 30


def connect(args):
    """A channel over the UNIX socket, or over TCP with mutual TLS."""
    if args.address is None:
        return grpc.insecure_channel(f"unix:{args.socket}")

    def read(path):
        with open(path, "rb") as file:
            return file.read()

    credentials = grpc.ssl_channel_credentials(
        root_certificates=read(args.ca),
        private_key=read(args.key),
        certificate_chain=read(args.cert),
    )
    return grpc.secure_channel(args.address, credentials)


def reason(error):
    """The reason of a failed call for programs: "VM_NOT_FOUND"; empty when vmmd did not give one."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return info.reason
    return ""


def change(call, request):
    """Sends a request that changes something until it is answered. With its id it is carried out once."""
    request.request_id = str(uuid.uuid4())
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return call(request)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                raise
            time.sleep(0.2)


class Watch:
    """What happens to one VM, over restarts of the daemon."""

    def __init__(self, vms, name):
        self.vms, self.name, self.cursor = vms, name, ""

    def events(self):
        """Events without end, each once: after a lost connection it continues after the last cursor."""
        lost = None
        while True:
            request = vm_pb2.WatchVmsRequest(name=self.name, cursor=self.cursor)
            try:
                for event in self.vms.WatchVms(request):
                    # Each connection has at least one event, SYNCED.
                    self.cursor, lost = event.cursor, None
                    yield event
            except grpc.RpcError as error:
                lost = lost or time.monotonic()
                if reason(error) == "CURSOR_EXPIRED":
                    # Events may have been missed: start again with the current state.
                    self.cursor = ""
                elif error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > lost + PATIENCE:
                    raise
            time.sleep(0.2)

    def until(self, wanted):
        """Waits for the first event for which `wanted` is true."""
        for event in self.events():
            if wanted(event):
                return event


def talk(vms, name, line, expected):
    """Types a line on the console and prints what comes until `expected` has been printed."""
    requests = queue.SimpleQueue()
    requests.put(vm_pb2.ConsoleRequest(open=vm_pb2.ConsoleOpen(name=name)))
    requests.put(vm_pb2.ConsoleRequest(input=line.encode() + b"\n"))
    responses = vms.Console(iter(requests.get, None))
    seen = b""
    for response in responses:
        if response.HasField("closed"):
            raise SystemExit(f"the console was closed: {response.closed.reason}")
        sys.stdout.write(response.output.decode(errors="replace"))
        seen += response.output
        if expected.encode() in seen:
            break
    requests.put(None)
    responses.cancel()


def manifest(args):
    """A small VM that boots a kernel of the node."""
    vm = vm_pb2.Vm()
    vm.metadata.name = args.name
    vm.metadata.labels["example"] = "python"
    vm.spec.cpu.cores = 1
    vm.spec.memory.size_bytes = 256 << 20
    vm.spec.boot.linux.kernel = args.kernel
    vm.spec.boot.linux.initrd = args.initrd
    vm.spec.boot.linux.cmdline = args.cmdline
    vm.spec.run_policy = vm_pb2.RUN_POLICY_MANUAL
    return vm


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket", default="/run/vmmd/vmmd.sock")
    parser.add_argument("--address", help="HOST:PORT of the API over TCP")
    parser.add_argument("--ca", help="certificate of the CA")
    parser.add_argument("--cert", help="this client's certificate")
    parser.add_argument("--key", help="its key")
    parser.add_argument("--kernel", required=True, help="path on the node")
    parser.add_argument("--initrd", default="", help="path on the node")
    parser.add_argument("--cmdline", default="console=ttyS0")
    parser.add_argument("--type", default="", help="a line for the console")
    parser.add_argument("--expect", default="", help="what the console prints then")
    parser.add_argument("name", help="of the VM")
    args = parser.parse_args()

    with connect(args) as channel:
        vms = vm_pb2_grpc.VmServiceStub(channel)
        created = change(vms.CreateVm, vm_pb2.CreateVmRequest(vm=manifest(args), start=True)).vm
        print(f"created {created.metadata.name}, uid {created.metadata.uid}")

        watch = Watch(vms, args.name)
        watch.until(lambda event: event.vm.status.phase == vm_pb2.VM_PHASE_RUNNING)
        print("it runs")
        # The next watch continues after this one, as after a lost connection.
        talk(vms, args.name, args.type, args.expect)

        delete = vm_pb2.DeleteVmRequest(name=args.name, force=True)
        # Never a newer VM with the same name.
        delete.preconditions.uid = created.metadata.uid
        change(vms.DeleteVm, delete)
        watch.until(lambda event: event.type == meta_pb2.WATCH_EVENT_TYPE_DELETED)
        print("it is deleted")


if __name__ == "__main__":
    main()
