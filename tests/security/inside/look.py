"""Looks for what it is told of by argument (JSON) and prints what it reached, one name a line.

On the host, which is where it must find all of it, it changes nothing.
"""

import ctypes
import json
import os
import socket
import struct
import sys

WANTED = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)


def contains(path, secret):
    try:
        with open(path, "rb") as file:
            return secret.encode() in file.read(1 << 20)
    except OSError:
        return False


def a_file():
    path = WANTED["file"]
    roots = ["", "/proc/1/root", "/proc/self/root", "/proc/self/cwd" + "/.." * 12, "/dev/.." * 3]
    roots += [f"/proc/{name}/root" for name in os.listdir("/proc") if name.isdigit()]
    return any(contains(root + path, WANTED["secret"]) for root in roots)


def a_file_by_handle():
    """The oldest way out of a container: a file's handle needs no path."""
    handle = struct.pack("Ii8s", 8, 1, struct.pack("II", WANTED["inode"], 0))
    root = os.open("/", os.O_RDONLY)
    fd = libc.syscall(304, root, handle, os.O_RDONLY)
    return fd >= 0


def a_process():
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return any(contains(f"/proc/{pid}/environ", WANTED["secret"]) for pid in [WANTED["pid"], *others])


def a_port():
    for host in WANTED["addresses"]:
        try:
            with socket.create_connection((host, WANTED["port"]), timeout=3) as found:
                if found.recv(100) == WANTED["secret"].encode():
                    return True
        except OSError:
            pass
    return False


def a_unix_socket():
    for address in (WANTED["socket"], "/proc/1/root" + WANTED["socket"]):
        with socket.socket(socket.AF_UNIX) as found:
            try:
                found.connect(address)
                return True
            except OSError:
                pass
    return False


def an_abstract_socket():
    with socket.socket(socket.AF_UNIX) as found:
        try:
            found.connect("\0" + WANTED["abstract"])
            return found.recv(100) == WANTED["secret"].encode()
        except OSError:
            return False


def a_name():
    """Files of the store and of other sandboxes, by name, anywhere."""
    wanted = set(WANTED["names"])
    for place in ("/", "/var/tmp/", "/tmp/", "/home/user/", os.path.dirname(WANTED["socket"])):
        for directory, directories, files in os.walk(place):
            if place == "/":
                skipped = ("proc", "sys", "dev", "usr", "lib", "var", "home", "work", "nix", "opt", "tmp")
                directories[:] = [name for name in directories if directory != "/" or name not in skipped]
            if wanted.intersection(files) or wanted.intersection(directories):
                return True
    return False


for look in (a_file, a_file_by_handle, a_process, a_port, a_unix_socket, an_abstract_socket, a_name):
    if look():
        print(look.__name__)
print("looked")
