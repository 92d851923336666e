# Made by `python -m honed.cli.reference --write docs`.
function __honectl_jobs
    honectl --job-numbers 2>/dev/null
end
complete -c honectl -n __fish_use_subcommand -f -a submit -d 'check and submit job files; relative paths become absolute'
complete -c honectl -n '__fish_seen_subcommand_from submit' -l json
complete -c honectl -n '__fish_seen_subcommand_from submit' -l hold
complete -c honectl -n '__fish_seen_subcommand_from submit' -l stage
complete -c honectl -n '__fish_seen_subcommand_from submit' -l wait
complete -c honectl -n __fish_use_subcommand -f -a check -d 'check job files as honed does before it accepts them'
complete -c honectl -n '__fish_seen_subcommand_from check' -l json
complete -c honectl -n __fish_use_subcommand -f -a plan -d 'show what a job would do and why; no model is loaded'
complete -c honectl -n '__fish_seen_subcommand_from plan' -l json
complete -c honectl -n __fish_use_subcommand -f -a preview -d 'show rows exactly as they will be trained on, with masked and trained text marked'
complete -c honectl -n '__fish_seen_subcommand_from preview' -l json
complete -c honectl -n '__fish_seen_subcommand_from preview' -l rows
complete -c honectl -n __fish_use_subcommand -f -a trial -d 'run a job on eight rows, ahead of the queue, and report learning, duration and memory'
complete -c honectl -n '__fish_seen_subcommand_from trial' -l json
complete -c honectl -n __fish_use_subcommand -f -a list -d 'list jobs and their progress: the first of each kind, or with --json all'
complete -c honectl -n '__fish_seen_subcommand_from list' -l json
complete -c honectl -n '__fish_seen_subcommand_from list' -l state
complete -c honectl -n '__fish_seen_subcommand_from list' -l all
complete -c honectl -n '__fish_seen_subcommand_from list' -l limit
complete -c honectl -n '__fish_seen_subcommand_from list' -l after
complete -c honectl -n '__fish_seen_subcommand_from list' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a show -d 'show a job'\''s details'
complete -c honectl -n '__fish_seen_subcommand_from show' -l json
complete -c honectl -n '__fish_seen_subcommand_from show' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a logs -d 'show the log of a job'\''s attempts; with --json one line of JSON per event'
complete -c honectl -n '__fish_seen_subcommand_from logs' -l json
complete -c honectl -n '__fish_seen_subcommand_from logs' -l follow
complete -c honectl -n '__fish_seen_subcommand_from logs' -l raw
complete -c honectl -n '__fish_seen_subcommand_from logs' -l explain
complete -c honectl -n '__fish_seen_subcommand_from logs' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a watch -d 'show live progress of all jobs, or of one; with --json one line of JSON per change'
complete -c honectl -n '__fish_seen_subcommand_from watch' -l json
complete -c honectl -n '__fish_seen_subcommand_from watch' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a cancel -d 'cancel queued, held or running jobs'
complete -c honectl -n '__fish_seen_subcommand_from cancel' -l json
complete -c honectl -n '__fish_seen_subcommand_from cancel' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a hold -d 'keep a queued job from starting, or stop a running one at a checkpoint'
complete -c honectl -n '__fish_seen_subcommand_from hold' -l json
complete -c honectl -n '__fish_seen_subcommand_from hold' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a release -d 'queue a held job again'
complete -c honectl -n '__fish_seen_subcommand_from release' -l json
complete -c honectl -n '__fish_seen_subcommand_from release' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a requeue -d 'queue a finished job again; unless it succeeded, it resumes from its last checkpoint, if any'
complete -c honectl -n '__fish_seen_subcommand_from requeue' -l json
complete -c honectl -n '__fish_seen_subcommand_from requeue' -l from-start
complete -c honectl -n '__fish_seen_subcommand_from requeue' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a pin -d 'protect a job from removal by prune and retention'
complete -c honectl -n '__fish_seen_subcommand_from pin' -l json
complete -c honectl -n '__fish_seen_subcommand_from pin' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a unpin -d 'allow prune and retention to remove a job again'
complete -c honectl -n '__fish_seen_subcommand_from unpin' -l json
complete -c honectl -n '__fish_seen_subcommand_from unpin' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a prune -d 'remove finished jobs, their checkpoints, or rejected files, and list them'
complete -c honectl -n '__fish_seen_subcommand_from prune' -l json
complete -c honectl -n '__fish_seen_subcommand_from prune' -l older-than
complete -c honectl -n '__fish_seen_subcommand_from prune' -l keep
complete -c honectl -n '__fish_seen_subcommand_from prune' -l max-size
complete -c honectl -n '__fish_seen_subcommand_from prune' -l state
complete -c honectl -n '__fish_seen_subcommand_from prune' -l checkpoints
complete -c honectl -n '__fish_seen_subcommand_from prune' -l rejected
complete -c honectl -n '__fish_seen_subcommand_from prune' -l dry-run
complete -c honectl -n '__fish_seen_subcommand_from prune' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a pause -d 'stop starting jobs; running jobs continue'
complete -c honectl -n __fish_use_subcommand -f -a resume -d 'start queued jobs again'
complete -c honectl -n __fish_use_subcommand -f -a predictions -d 'show predictions for held-out examples, step by step, next to the reference'
complete -c honectl -n '__fish_seen_subcommand_from predictions' -l json
complete -c honectl -n '__fish_seen_subcommand_from predictions' -l sample
complete -c honectl -n '__fish_seen_subcommand_from predictions' -l step
complete -c honectl -n '__fish_seen_subcommand_from predictions' -l jsonl
complete -c honectl -n '__fish_seen_subcommand_from predictions' -l csv
complete -c honectl -n '__fish_seen_subcommand_from predictions' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a report -d 'print the path of a job'\''s report, or of the index of all jobs'
complete -c honectl -n '__fish_seen_subcommand_from report' -l json
complete -c honectl -n '__fish_seen_subcommand_from report' -l open
complete -c honectl -n '__fish_seen_subcommand_from report' -f -a '(__honectl_jobs)'
complete -c honectl -n __fish_use_subcommand -f -a sandbox -d 'give the units access to policy.allowed_paths (as root)'
complete -c honectl -n '__fish_seen_subcommand_from sandbox' -l dry-run
complete -c honectl -n __fish_use_subcommand -f -a doctor -d 'check this machine: versions, GPU, disk, permissions'
complete -c honectl -n '__fish_seen_subcommand_from doctor' -l json
