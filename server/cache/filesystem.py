"""Which file systems can carry a store: local ones.

SQLite's WAL and atomic renames do not work on the others.
"""

from __future__ import annotations

import os
from pathlib import Path

# By the type that /proc/self/mountinfo names. 9p and virtiofs share a host's folder: their shared memory maps
# are not coherent between guests, which WAL needs.
_SHARED_BY_HOST = "9p virtiofs vboxsf vmhgfs"
_CLUSTER = "afs beegfs ceph coda gfs gfs2 glusterfs gpfs lustre ocfs2 orangefs pvfs2 wekafs"
_SERVER = "cifs davfs ncpfs nfs nfs4 smb2 smb3 smbfs"
NETWORK_TYPES = frozenset(f"{_SHARED_BY_HOST} {_CLUSTER} {_SERVER}".split())
# The kernel's own, which hold no files of ours.
_KERNEL = "bpf cgroup cgroup2 debugfs devpts mqueue proc securityfs sysfs tracefs"
KERNEL_TYPES = frozenset(_KERNEL.split())
# User-space file systems are mostly object stores and SSH; these are the local ones.
LOCAL_FUSE = frozenset(
    ["fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs", "fuse.ntfs-3g", "fuse.lxcfs", "fuse.ext4", "fuse.bindfs"]
)


class StoreFolderError(Exception):
    """The folder can never be a store as it is. The text says why, and what to do."""


def is_network(fstype: str) -> bool:
    return fstype in NETWORK_TYPES or (fstype.startswith("fuse") and fstype not in LOCAL_FUSE)


def type_of_mount(path: str, mountinfo: str) -> str:
    """Return the type of the file system that holds the absolute `path`, "" when unknown.

    Source: proc_pid_mountinfo(5). The last line wins among equal mount points: it is mounted over the others.
    """
    best, found = "", ""
    for line in mountinfo.splitlines():
        fields, separator, tail = line.partition(" - ")
        parts = fields.split()
        if not separator or len(parts) < 5 or not tail.split():
            continue
        point = parts[4].encode().decode("unicode_escape")  # A blank in a mount point is \040.
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, found = point, tail.split()[0]
    return found


def refuse_unusable(folder: Path) -> None:
    """Raise StoreFolderError when `folder` cannot be a store whatever happens next: for a start, at which
    somebody is there to give another one. A folder that may only be read is fine.
    """
    existing = folder.absolute()
    while not existing.exists() and not existing.is_symlink() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise StoreFolderError(
            f"{folder} cannot be a store: {existing} is not a directory; give --store another folder"
        )
    if existing == folder.absolute():
        needed, what = os.R_OK | os.X_OK, "read"
    else:
        needed, what = os.W_OK | os.X_OK, "make folders in"
    if not os.access(existing, needed):
        raise StoreFolderError(
            f"{folder} cannot be a store: uid {os.getuid()} may not {what} {existing}; "
            "give --store a folder of your own, or change its owner or mode"
        )
    refuse_network(folder)


def refuse_network(folder: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
    """Raise StoreFolderError when `folder`, or its nearest existing parent, is on a network file system, or
    on one of the kernel's.
    """
    try:
        mounts = mountinfo.read_text(errors="surrogateescape")
    except OSError:
        return  # Not Linux: the write probe and SQLite's own errors remain.
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    fstype = type_of_mount(os.path.realpath(existing), mounts)
    if fstype in KERNEL_TYPES:
        raise StoreFolderError(
            f"{folder} cannot be a store: {existing} belongs to the kernel ({fstype}); "
            "give --store a folder on a local disk"
        )
    if is_network(fstype):
        raise StoreFolderError(
            f"{folder} is on a network file system ({fstype}), where the store's index cannot work: "
            "give --store a folder on a local disk, and share artifacts between hosts through --redis"
        )
