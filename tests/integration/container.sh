# A container by hand: namespaces of its own, a root made of read-only mounts, limits by its control group.
set -e
group=/sys/fs/cgroup/inner
echo "+memory +pids" > /sys/fs/cgroup/cgroup.subtree_control
mkdir -p $group /box/usr /box/proc /box/tmp
echo 64M > $group/memory.max
echo 0 > $group/memory.swap.max 2>/dev/null || true
echo 20 > $group/pids.max
mount --bind -o ro /usr /box/usr
for name in bin lib lib64 sbin; do ln -sfn usr/$name /box/$name; done
inside='mount -t proc proc /proc; hostname inner; echo pid=$$; echo host=$(hostname)
echo processes=$(ls /proc | grep -c "^[0-9]")
sh -c "x=x; while :; do x=\$x\$x; done" 2>/dev/null; echo hog=$?'
sh -c "echo \$\$ > $group/cgroup.procs; exec unshare --mount --pid --fork --uts --ipc --net --cgroup \
    chroot /box sh -c '$inside'"
grep -q '^oom_kill [1-9]' $group/memory.events
[ "$(hostname)" != inner ] && echo outside=whole
umount /box/usr
rmdir $group
