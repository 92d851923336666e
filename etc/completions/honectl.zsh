#compdef honectl
# Made by `python -m honed.cli.reference --write docs`.
local -a verbs
verbs=(
        'submit:check job files and drop them into the spool; relative paths become absolute'
        'check:check job files as honed would before it accepts them'
        'plan:what would be done and why; no model is loaded'
        'preview:rows exactly as they will be trained on, masked and trained text told apart'
        'trial:try a job on eight rows, before all others: does it learn, how long, how much memory'
        'list:jobs and their progress: the first of each kind, or with --json all'
        'show:all that is known of one job'
        'logs:what a job'\''s attempts told; with --json a line of JSON for each event'
        'watch:live progress of all jobs, or of one; with --json a line of JSON for each change'
        'cancel:end a job for good'
        'hold:keep a queued job from starting, or stop a running one at a checkpoint'
        'release:let a held job go on'
        'requeue:queue a finished job again, from its last checkpoint if it has one'
        'pin:keep a job: neither prune nor retention removes it'
        'unpin:keep a job no longer'
        'prune:remove finished jobs, or their checkpoints, or refused files; says what'
        'pause:start no more jobs; running ones go on'
        'resume:start jobs again'
        'predictions:what the model wrote for held-out examples, step by step, beside the truth'
        'report:the path of a job'\''s page, or of the index over all jobs'
        'sandbox:open the units'\'' sandbox to policy.allowed_paths (root)'
        'doctor:is this machine fit: versions, GPU, disk, permissions'
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
        list) _arguments '--json' '--state' '--all' '--limit' '--after' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        show) _arguments '--json' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        logs) _arguments '--json' '--follow' '--raw' '--explain' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        watch) _arguments '--json' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        cancel) _arguments '--json' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        hold) _arguments '--json' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        release) _arguments '--json' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        requeue) _arguments '--json' '--from-start' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        pin) _arguments '--json' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        unpin) _arguments '--json' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        prune) _arguments '--json' '--older-than' '--keep' '--max-size' '--state' '--checkpoints' '--rejected' '--dry-run' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        pause) _arguments  '*:file:_files' ;;
        resume) _arguments  '*:file:_files' ;;
        predictions) _arguments '--json' '--sample' '--step' '--jsonl' '--csv' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        report) _arguments '--json' '--open' '*:job:($(honectl list --json 2>/dev/null | sed -n "s/^ *"id": \([0-9]*\),*$/\1/p"))' ;;
        sandbox) _arguments '--dry-run' '*:file:_files' ;;
        doctor) _arguments '--json' '*:file:_files' ;;
    esac
fi
