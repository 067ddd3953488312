#!/bin/sh
# Energy of a Slurm job by the counters of its GPUs, and no GPU left changed behind it. In slurm.conf:
#   Prolog=/etc/slurm/wattcast-slurm.sh    Epilog=/etc/slurm/wattcast-slurm.sh
# The epilog logs the joules of each GPU, writes them to $WATTCAST_JOBS/JOB.csv, and has the daemon
# give back what the job left changed. It never fails a job: Slurm drains a node whose prolog fails.
set -u
jobs=${WATTCAST_JOBS:-/var/spool/wattcast}
job=${SLURM_JOB_ID:?Slurm names the job}
phase=${SLURM_SCRIPT_CONTEXT:-$1}
before=$jobs/$job.before

# Print "index uuid joules" of each GPU of the job, of those that tell their energy.
read_counters() {
    wattcast export prometheus --source nvml --once 2>/dev/null |
        awk -v gpus=",${SLURM_JOB_GPUS:-}," '
            /^wattcast_energy_joules_total\{/ {
                match($0, /device="[^"]*"/); device = substr($0, RSTART + 8, RLENGTH - 9)
                match($0, /uuid="[^"]*"/); uuid = substr($0, RSTART + 6, RLENGTH - 7)
                if (index(gpus, "," device ",")) print device, uuid, $NF
            }'
}

case $phase in
prolog*)
    mkdir -p "$jobs" && read_counters >"$before"
    ;;
epilog*)
    [ -s "$before" ] || exit 0
    read_counters >"$jobs/$job.after"
    awk -v job="$job" '
        BEGIN { print "job,gpu,uuid,energy_j" }
        NR == FNR { start[$2] = $3; next }
        $2 in start && $3 >= start[$2] { printf "%s,%s,%s,%.0f\n", job, $1, $2, $3 - start[$2] }
    ' "$before" "$jobs/$job.after" >"$jobs/$job.csv"
    while read -r index uuid _; do
        wattcast manage restore "$uuid" ${WATTCAST_SOCKET:+--socket "$WATTCAST_SOCKET"} >/dev/null 2>&1 ||
            logger -t wattcast "job $job: GPU $index ($uuid) was not given back" 2>/dev/null
    done <"$jobs/$job.after"
    tail -n +2 "$jobs/$job.csv" | while read -r line; do
        logger -t wattcast "job,gpu,uuid,energy_j: $line" 2>/dev/null
    done
    rm -f "$before" "$jobs/$job.after"
    ;;
esac
exit 0
