#!/bin/bash
# Becomes PID 1 of a guest: systemd in namespaces of its own, on an overlay over this machine's files. Called by
# machine.py, in fresh mount, pid, cgroup, network, uts and ipc namespaces: boot.sh STAGE UNIT [SOURCE TARGET]…
# STAGE is a directory (on a tmpfs) that outlives the guest and is its disk; each SOURCE is shown to it at TARGET, and
# what it changes there is its own.
set -euo pipefail
stage=$1 unit=$2
shift 2
mount --make-rprivate /
mkdir -p "$stage/upper" "$stage/work" "$stage/root"
root=$stage/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$stage/upper,workdir=$stage/work" "$root"

# A /dev of its own: journald and logind make links and mounts there.
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
for path in /dev/nvidia* /dev/fuse; do
    [ -c "$path" ] || continue
    touch "$root$path"
    mount --bind "$path" "$root$path"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,mode=620,gid=5,ptmxmode=666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"

# The kernel's settings are this machine's, not the guest's.
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
# Each boot is one of its own, in the journal and to whoever compares.
cat /proc/sys/kernel/random/uuid >"$root/run/boot-id"
mount --bind "$root/run/boot-id" "$root/proc/sys/kernel/random/boot_id"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -o remount,bind,ro "$root/sys"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"

while [ $# -ge 2 ]; do
    mkdir -p "$root$2" "$stage/shown$2/upper" "$stage/shown$2/work"
    mount -t overlay overlay -o "lowerdir=$1,upperdir=$stage/shown$2/upper,workdir=$stage/shown$2/work" "$root$2"
    shift 2
done

if [ ! -e "$stage/booted" ]; then
    # The guest is a fresh machine: what this one starts is none of its business.
    rm -rf "$root"/etc/systemd/system/*.wants
    : >"$root/etc/fstab"
    echo guest >"$root/etc/hostname"
    tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"
    mkdir -p "$root/var/log/journal"
    touch "$stage/booted"
fi
mkdir -p "$root/host"
cd "$root"
pivot_root . host
# Shared, or the mounts that PID 1 makes for a unit's credentials do not reach it.
exec chroot . /bin/bash -c '
    umount -l /host
    mount --make-rshared /
    exec env -i container=honed-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        /usr/lib/systemd/systemd --system --unit="$1" --log-target=journal --show-status=no' boot "$unit"
