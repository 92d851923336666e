#compdef honectl
# Made by `python -m honed.cli.reference --write docs`.
local -a verbs
verbs=(
        'submit:check and submit job files; relative paths become absolute'
        'check:check job files as honed does before it accepts them'
        'plan:show what a job would do and why; no model is loaded'
        'preview:show rows exactly as they will be trained on, with masked and trained text marked'
        'trial:run a job on eight rows, ahead of the queue, and report learning, duration and memory'
        'list:list jobs and their progress: the first of each kind, or with --json all'
        'show:show a job'\''s details'
        'logs:show the log of a job'\''s attempts; with --json one line of JSON per event'
        'watch:show live progress of all jobs, or of one; with --json one line of JSON per change'
        'cancel:cancel queued, held or running jobs'
        'hold:keep a queued job from starting, or stop a running one at a checkpoint'
        'release:queue a held job again'
        'requeue:queue a finished job again; unless it succeeded, it resumes from its last checkpoint, if any'
        'pin:protect a job from removal by prune and retention'
        'unpin:allow prune and retention to remove a job again'
        'prune:remove finished jobs, their checkpoints, or rejected files, and list them'
        'pause:stop starting jobs; running jobs continue'
        'resume:start queued jobs again'
        'predictions:show predictions for held-out examples, step by step, next to the reference'
        'report:print the path of a job'\''s report, or of the index of all jobs'
        'sandbox:give the units access to policy.allowed_paths (as root)'
        'doctor:check this machine: versions, GPU, disk, permissions'
)
if (( CURRENT == 2 )); then
    _describe verb verbs
else
    local verb=$words[2]
    shift words; (( CURRENT-- ))
    case $verb in
        submit) _arguments '--json' '--hold' '--stage' '--wait' '*:file:_files' ;;
        check) _arguments '--json' '*:file:_files' ;;
        plan) _arguments '--json' '*:file:_files' ;;
        preview) _arguments '--json' '--rows' '*:file:_files' ;;
        trial) _arguments '--json' '*:file:_files' ;;
        list) _arguments '--json' '--state' '--all' '--limit' '--after' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        show) _arguments '--json' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        logs) _arguments '--json' '--follow' '--raw' '--explain' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        watch) _arguments '--json' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        cancel) _arguments '--json' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        hold) _arguments '--json' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        release) _arguments '--json' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        requeue) _arguments '--json' '--from-start' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        pin) _arguments '--json' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        unpin) _arguments '--json' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        prune) _arguments '--json' '--older-than' '--keep' '--max-size' '--state' '--checkpoints' '--rejected' '--dry-run' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        pause) _arguments  '*:file:_files' ;;
        resume) _arguments  '*:file:_files' ;;
        predictions) _arguments '--json' '--sample' '--step' '--jsonl' '--csv' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        report) _arguments '--json' '--open' '*:job:($(honectl --job-numbers 2>/dev/null))' ;;
        sandbox) _arguments '--dry-run' '*:file:_files' ;;
        doctor) _arguments '--json' '*:file:_files' ;;
    esac
fi
