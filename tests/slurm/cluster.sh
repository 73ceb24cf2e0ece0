#!/usr/bin/env bash
# A real Slurm on this machine's loopback, for the tests: munge, MariaDB, slurmdbd, slurmctld and one slurmd with eight
# pretended GPUs. Debian, root; no systemd, no port but on 127.0.0.1. Memory is limited where this machine has cgroup v1's
# controller for it, which needs no systemd.
#
#   cluster.sh start    install what is missing, write the configuration, start the daemons; does nothing if they run
#   cluster.sh stop     cancel the jobs and end the daemons started here
#   cluster.sh pause    stop the controller alone, as in an outage; `start` brings it back
#   cluster.sh env      print what clients and tests need:  eval "$(tests/slurm/cluster.sh env)"
#
# LBVA_TUI_TEST_CLUSTER is its folder [/var/tmp/lbva-tui-slurm]; short, since sockets lie in it. Everything is there.
# Partitions: own (preempts), extra (requeued at once), grace (requeued after 20 s).
set -euo pipefail
here=${LBVA_TUI_TEST_CLUSTER:-/var/tmp/lbva-tui-slurm}
port=27800
etc=$here/etc run=$here/run log=$here/log
export SLURM_CONF=$etc/slurm.conf PATH=$PATH:/usr/sbin:/sbin
say() { echo "cluster.sh: $*" >&2; }

# A number is one of our daemons only while the process still has the start time that was noted.
start_time() { sed -e 's/^.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
alive() {
  local pid ticks
  [ -r "$run/$1.pid" ] && read -r pid ticks <"$run/$1.pid" && [ -n "$ticks" ] && [ "$(start_time "$pid")" = "$ticks" ]
}
launch() {
  local name=$1; shift
  alive "$name" && return
  setsid "$@" >>"$log/$name.out" 2>&1 </dev/null &
  echo "$! $(start_time $!)" >"$run/$name.pid"
}
halt() {
  local pid ticks
  alive "$1" || return 0
  read -r pid ticks <"$run/$1.pid"
  kill -TERM "$pid"
  for _ in $(seq 150); do alive "$1" || break; sleep 0.1; done
  ! alive "$1" || kill -KILL "$pid"
  rm -f "$run/$1.pid"
}
wait_for() {
  local end=$((SECONDS + $1)) what=$2; shift 2
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge $end ]; then
      say "$what did not come up; the ends of the logs:"
      tail -n 8 "$log"/* >&2
      exit 1
    fi
    sleep 0.1
  done
}

# Is a job that takes more memory than it asked for killed here?
limits_memory() {
  local group=/sys/fs/cgroup/memory/lbva-tui-$$
  mkdir "$group" 2>/dev/null && rmdir "$group"
}

install_packages() {
  local package missing=()
  for package in slurmctld slurmd slurm-client slurmdbd slurm-wlm-basic-plugins slurm-wlm-mysql-plugin munge \
    mariadb-server-core mariadb-client-core; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  # The packages would start their daemons on the usual ports.
  local policy=/usr/sbin/policy-rc.d made=
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy; chmod 755 $policy; made=1; }
  export DEBIAN_FRONTEND=noninteractive
  local status=0
  { apt-get update -q && apt-get install -y -q --no-install-recommends "${missing[@]}"; } >"$log/apt.log" 2>&1 || status=$?
  [ -z "$made" ] || rm -f $policy
  [ $status = 0 ] || { tail -n 20 "$log/apt.log" >&2; say "the packages cannot be installed"; exit 1; }
}

configure() {
  local host devices="File=$here/dev/nvidia[0-7]" i
  host=$(hostname -s)
  # The daemons bind to what the host's name means.
  case "$(getent ahostsv4 "$host" | awk 'NR==1{print $1}')" in
    127.*) ;;
    *) say "adding '127.0.0.1 $host' to /etc/hosts"; sed "1i 127.0.0.1 $host" /etc/hosts >"$run/hosts" && cat "$run/hosts" >/etc/hosts ;;
  esac
  for i in 0 1 2 3 4 5 6 7; do
    # A GPU must be a character device: copies of /dev/null. Where none can be made they are only counted.
    [ -c "$here/dev/nvidia$i" ] || mknod -m 666 "$here/dev/nvidia$i" c 1 3 2>/dev/null || devices="Flags=CountOnly Count=8"
  done
  local tasks=none
  echo "CgroupAutomount=no" >"$etc/cgroup.conf"
  if limits_memory; then
    tasks=cgroup
    printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=/sys/fs/cgroup ConstrainRAMSpace=yes AllowedSwapSpace=0 ConstrainSwapSpace=no >>"$etc/cgroup.conf"
  fi
  cat >"$etc/slurm.conf" <<CONF
ClusterName=lbvatest
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$port
SrunPortRange=$((port + 100))-$((port + 190))
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
# Also how long a requeued job waits before it starts again; 120 without it.
AuthInfo=socket=$here/munge/sock,cred_expire=5
StateSaveLocation=$here/state
SlurmdSpoolDir=$here/spool/%n
SlurmctldPidFile=$run/slurmctld.own.pid
SlurmdPidFile=$run/slurmd.own.pid
SlurmctldLogFile=$log/slurmctld.log
SlurmdLogFile=$log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/$tasks
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=4000
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
MinJobAge=300
InactiveLimit=0
Waittime=0
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5,batch_sched_delay=1,sched_min_interval=10000,preempt_strict_order
PriorityType=priority/multifactor
PriorityWeightPartition=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 1))
AccountingStoragePass=$here/munge/sock
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
NodeName=gpu1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 10)) CPUs=112 Boards=1 SocketsPerBoard=2 CoresPerSocket=56 ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:8 State=UNKNOWN
PartitionName=own Nodes=gpu1 PriorityTier=1000 PriorityJobFactor=1000 PreemptMode=OFF MaxTime=2-0 DefaultTime=60
PartitionName=extra Nodes=gpu1 PriorityTier=1 PriorityJobFactor=1 PreemptMode=REQUEUE MaxTime=2-0 DefaultTime=60 Default=YES
PartitionName=grace Nodes=gpu1 PriorityTier=1 PriorityJobFactor=1 PreemptMode=REQUEUE GraceTime=20 MaxTime=2-0 DefaultTime=60
CONF
  echo "NodeName=gpu1 Name=gpu $devices" >"$etc/gres.conf"
  (umask 077; cat >"$etc/slurmdbd.conf") <<CONF
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$((port + 1))
CommunicationParameters=NoInAddrAny
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$here/munge/sock
LogFile=$log/slurmdbd.log
PidFile=$run/slurmdbd.own.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageLoc=slurm_acct_db
StorageUser=root
CONF
  cat >"$etc/my.cnf" <<CONF
[mariadbd]
datadir=$here/db/data
socket=$here/db/sock
pid-file=$run/mariadbd.own.pid
skip-networking
skip-name-resolve
performance_schema=OFF
innodb_buffer_pool_size=16M
innodb_log_file_size=16M
innodb_lock_wait_timeout=900
innodb_flush_log_at_trx_commit=2
CONF
}

start() {
  local began=$SECONDS
  umask 022
  mkdir -p "$etc" "$run" "$log" "$here/state" "$here/spool" "$here/munge" "$here/dev" "$here/db"
  chmod 755 "$here" "$here/munge"
  install_packages
  configure
  [ -s "$here/munge/key" ] || (umask 077; head -c 128 /dev/urandom >"$here/munge/key")
  launch munged munged -F --force --key-file="$here/munge/key" --socket="$here/munge/sock" --pid-file="$here/munge/pid" \
    --log-file="$log/munged.log" --seed-file="$here/munge/seed"
  wait_for 10 munged sh -c "munge -S '$here/munge/sock' -n | unmunge -S '$here/munge/sock'"
  [ -d "$here/db/data/mysql" ] || mariadb-install-db --no-defaults --user=root --datadir="$here/db/data" --skip-test-db \
    --auth-root-authentication-method=socket --auth-root-socket-user=root >"$log/install-db.log" 2>&1
  launch mariadbd mariadbd --defaults-file="$etc/my.cnf" --user=root
  wait_for 60 mariadbd mariadb --no-defaults -S "$here/db/sock" -u root -e 'select 1'
  # The client library takes the socket's path from here.
  launch slurmdbd env MYSQL_UNIX_PORT="$here/db/sock" slurmdbd -D
  wait_for 60 slurmdbd timeout 5 sacctmgr -n -P show cluster
  [ -n "$(sacctmgr -n -P show cluster format=cluster)" ] || sacctmgr -i add cluster lbvatest >>"$log/sacctmgr.log" 2>&1
  # An account for whoever starts this, without which every account and QOS would be taken; and a QOS that takes no job.
  if [ -z "$(sacctmgr -n -P show qos full format=name)" ]; then
    {
      sacctmgr -i add account lab
      sacctmgr -i add user "$(id -un)" account=lab
      sacctmgr -i add qos full set maxsubmitjobsperuser=0
      sacctmgr -i modify user "$(id -un)" set qos+=full
    } >>"$log/sacctmgr.log" 2>&1 || true
  fi
  launch slurmctld slurmctld -D -f "$SLURM_CONF"
  wait_for 30 slurmctld sh -c "scontrol ping | grep -q 'is UP'"
  launch slurmd slurmd -D -f "$SLURM_CONF" -N gpu1
  # As a test that was killed may have left it.
  ! sinfo -h -t down,drain -o %t | grep -q . || scontrol update nodename=gpu1 state=resume || true
  wait_for 60 slurmd sh -c "sinfo -h -o %t | grep -Eq '^(idle|mix|alloc|comp)$'"
  say "Slurm $(sinfo -V | cut -d' ' -f2) is up after $((SECONDS - began)) s"
}

stop() {
  if alive slurmctld && timeout 5 scontrol ping >/dev/null 2>&1; then
    timeout 10 scancel --quiet -u "$(id -un)" -f 2>/dev/null || true
    for _ in $(seq 60); do [ -n "$(timeout 5 squeue -h -t R,CG -o %i 2>/dev/null)" ] || break; sleep 0.2; done
  fi
  for daemon in slurmd slurmctld slurmdbd mariadbd munged; do halt $daemon; done
}

case "${1:-}" in
  start) start ;;
  stop) stop ;;
  pause) halt slurmctld ;;
  env)
    printf 'export SLURM_CONF=%q LBVA_TUI_TEST_SLURM=%q\n' "$SLURM_CONF" "$(realpath "$0")"
    grep -q ConstrainRAMSpace=yes "$etc/cgroup.conf" && echo export LBVA_TUI_TEST_SLURM_MEMORY=1
    ;;
  *) sed -n '2,13p' "$0"; exit 2 ;;
esac
