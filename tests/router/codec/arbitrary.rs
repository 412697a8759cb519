//! Strategies for every frame. They are boxed because unboxed ones, nested like this, overflow a test's stack.

use headrace_router::core::frame::*;
use headrace_router::core::secret::PullKey;
use proptest::collection::vec;
use proptest::num::f64;
use proptest::option;
use proptest::prelude::*;

/// Any frame. No NaN, so that frames can be compared.
pub(crate) fn frame() -> BoxedStrategy<Frame> {
    let worker_side = prop_oneof![
        hello().prop_map(Frame::Hello),
        bytes().prop_map(|proof| Frame::Prove(Prove { proof })),
        (int64(), int64(), bytes(), any::<bool>()).prop_map(|(epoch, sequence, hashes, last)| {
            Frame::Snapshot(Snapshot { epoch, sequence, hashes, last })
        }),
        (int64(), int64(), vec(stored(), 0..4), bytes(), any::<bool>(), any::<u8>()).prop_map(
            |(epoch, sequence, stored, removed, cleared, tier)| {
                Frame::Blocks(Blocks { epoch, sequence, stored, removed, cleared, tier })
            }
        ),
        step().prop_map(Frame::Step),
        (text(), int32(), any::<bool>(), bytes()).prop_map(|(fingerprint, part, last, data)| {
            Frame::Model(ModelPart { fingerprint, part, last, data })
        }),
        (request(), ticket(), int32()).prop_map(|(request, ticket, lease_ms)| {
            Frame::KvReady(KvReady { request, ticket, lease_ms })
        }),
        (request(), int32()).prop_map(|(request, blocks)| Frame::Freed(Freed { request, blocks })),
        (request(), word(), text()).prop_map(|(request, kind, message)| {
            Frame::Failed(Failed { request, kind, message })
        }),
        text().prop_map(|reason| Frame::Bye(Bye { reason })),
        transferred().prop_map(Frame::Transferred),
        (ticket(), tree(), int32()).prop_map(|(ticket, (names, parents, hits), lease_ms)| {
            Frame::Offer(Offer { ticket, names, parents, hits, lease_ms })
        }),
        group_totals().prop_map(Frame::GroupTotals),
        grammar_totals().prop_map(Frame::GrammarTotals),
        vec((int32(), int32(), int32(), int32()), 0..17).prop_map(|prompts| {
            let prompt =
                |(behind, tokens, left, prompts)| OtherPrompt { behind, tokens, left, prompts };
            Frame::OtherPrompts(OtherPrompts { prompts: prompts.into_iter().map(prompt).collect() })
        }),
    ];
    let router_side = prop_oneof![
        (any::<u16>(), text(), int32(), bytes(), bytes(), bytes()).prop_map(
            |(protocol, router, heartbeat_ms, challenge, proof, hash_key)| {
                Frame::Welcome(Welcome {
                    protocol,
                    router,
                    heartbeat_ms,
                    challenge,
                    proof,
                    hash_key,
                })
            }
        ),
        (text(), text(), text(), text()).prop_map(|(field, expected, got, message)| {
            Frame::OtherVersion(OtherVersion { field, expected, got, message })
        }),
        refuse().prop_map(Frame::Refuse),
        submit().prop_map(Frame::Submit),
        text().prop_map(|fingerprint| Frame::Describe(Describe { fingerprint })),
        request().prop_map(|request| Frame::Cancel(Cancel { request })),
        (int64(), option::of(migration_order()))
            .prop_map(|(budget_ms, migration)| { Frame::Drain(Drain { budget_ms, migration }) }),
        int64().prop_map(|nonce| Frame::Ping(Ping { nonce })),
        text().prop_map(|reason| Frame::Resync(Resync { reason })),
        (request(), ticket())
            .prop_map(|(request, ticket)| { Frame::Ticket(Ticket { request, ticket }) }),
        (request(), vec(any::<[u8; 4]>(), 0..9)).prop_map(|(request, generated)| {
            Frame::Continue(Continue { request, generated: generated.concat() })
        }),
        (request(), kv_from(), ticket(), tree()).prop_map(
            |(request, kv_from, ticket, (names, parents, offset))| {
                Frame::Fetch(Fetch { request, kv_from, ticket, names, parents, offset })
            }
        ),
    ];
    prop_oneof![worker_side, router_side].boxed()
}

/// All widths that an integer can have on the wire.
fn int32() -> BoxedStrategy<u32> {
    prop_oneof![0..256u32, 0..70_000u32, any::<u32>(), Just(u32::MAX)].boxed()
}

fn int64() -> BoxedStrategy<u64> {
    prop_oneof![int32().prop_map(u64::from), any::<u64>(), Just(u64::MAX)].boxed()
}

fn real() -> BoxedStrategy<f64> {
    (f64::NORMAL | f64::SUBNORMAL | f64::ZERO | f64::INFINITE).boxed()
}

/// Lengths on both sides of each length format.
fn text() -> BoxedStrategy<String> {
    prop_oneof![
        any::<String>(),
        (0..300usize).prop_map(|n| "é".repeat(n)),
        Just("x".repeat(70_000)),
    ]
    .boxed()
}

fn bytes() -> BoxedStrategy<Vec<u8>> {
    prop_oneof![vec(any::<u8>(), 0..40), vec(any::<u8>(), 250..260), Just(vec![7; 70_000])].boxed()
}

fn ticket() -> BoxedStrategy<Vec<u8>> {
    vec(any::<u8>(), 0..=MAX_TICKET_BYTES).boxed()
}

/// Names of blocks, the places of their parents, and a number for each.
fn tree() -> BoxedStrategy<(Vec<u8>, Vec<i32>, Vec<u32>)> {
    let block = (any::<[u8; NAME_BYTES]>(), any::<prop::sample::Index>(), int32());
    vec(block, 0..40)
        .prop_map(|blocks| {
            let parents = blocks.iter().enumerate().map(|(place, (_, parent, _))| {
                i32::try_from(parent.index(place + 1)).expect("at most 40") - 1
            });
            (
                blocks.iter().flat_map(|(name, _, _)| *name).collect(),
                parents.collect(),
                blocks.iter().map(|(_, _, number)| *number).collect(),
            )
        })
        .boxed()
}

fn request() -> BoxedStrategy<RequestId> {
    int64().prop_map(RequestId).boxed()
}

fn hello() -> BoxedStrategy<Hello> {
    let group = (text(), int32(), int32(), int64(), text())
        .prop_map(|(id, rank, size, epoch, transport)| Group { id, rank, size, epoch, transport });
    let fingerprints = (text(), text(), text(), text(), text(), int32()).prop_map(
        |(weights, tokenizer, chat_template, kv_layout, hash_scheme, block_tokens)| Fingerprints {
            weights,
            tokenizer,
            chat_template,
            kv_layout,
            hash_scheme,
            block_tokens,
        },
    );
    let capacity = (int32(), int32(), int32(), int32(), int32(), int32()).prop_map(
        |(blocks, sequences, batched_tokens, waiting, host_blocks, disk_blocks)| Capacity {
            blocks,
            sequences,
            batched_tokens,
            waiting,
            host_blocks,
            disk_blocks,
        },
    );
    (
        Just(PROTOCOL), // of another version only that is read
        text(),
        int64(),
        word(),
        text(),
        fingerprints,
        capacity,
        int32(),
        option::of(group),
        vec(text(), 0..3),
        (bytes(), option::of(step_cost()), int64(), text(), vec(text(), 0..3), int32(), word()),
    )
        .prop_map(
            |(
                protocol,
                worker,
                epoch,
                role,
                model,
                fingerprints,
                capacity,
                context_tokens,
                group,
                transfer,
                (nonce, step_prior, kv_block_bytes, dtype, aliases, pooled_width, queue_rule),
            )| Hello {
                protocol,
                worker,
                epoch,
                role,
                model,
                fingerprints,
                capacity,
                context_tokens,
                group,
                transfer,
                nonce,
                step_prior,
                kv_block_bytes,
                dtype,
                aliases,
                pooled_width,
                queue_rule,
            },
        )
        .boxed()
}

fn step_cost() -> BoxedStrategy<StepCost> {
    (real(), real(), real(), real(), real())
        .prop_map(|(fixed_ms, prefill_ms, context_ms, row_ms, kv_ms)| StepCost {
            fixed_ms,
            prefill_ms,
            context_ms,
            row_ms,
            kv_ms,
        })
        .boxed()
}

fn stored() -> BoxedStrategy<StoredRun> {
    (option::of(int64()), bytes()).prop_map(|(parent, hashes)| StoredRun { parent, hashes }).boxed()
}

fn ranked() -> BoxedStrategy<Ranked> {
    (int32(), real()).prop_map(|(id, value)| Ranked(id, value)).boxed()
}

fn logprobs() -> BoxedStrategy<Vec<TokenLogprob>> {
    let one =
        (real(), vec(ranked(), 0..4)).prop_map(|(logprob, top)| TokenLogprob { logprob, top });
    vec(one, 0..4).boxed()
}

fn output() -> BoxedStrategy<Output> {
    let finish = prop_oneof![Just(Finish::Stop), Just(Finish::Length), Just(Finish::Cancelled)];
    (
        request(),
        vec(int32(), 0..20),
        option::of(logprobs()),
        option::of(finish),
        option::of(int32()),
        option::of(logprobs()),
        (int32(), int32(), option::of(bytes())),
    )
        .prop_map(|(request, ids, logprobs, finish, cached_tokens, prompt_logprobs, drafts)| {
            Output {
                request,
                ids,
                logprobs,
                finish,
                cached_tokens,
                prompt_logprobs,
                drafted: drafts.0,
                accepted: drafts.1,
                pooled: drafts.2,
            }
        })
        .boxed()
}

fn step() -> BoxedStrategy<Step> {
    let load = (int32(), int32(), int32(), int32(), int64()).prop_map(
        |(blocks_used, blocks_cached, running, waiting, preemptions)| Load {
            blocks_used,
            blocks_cached,
            running,
            waiting,
            preemptions,
        },
    );
    let drafts = (int32(), int32());
    let numbers = (int64(), real(), int32(), int32(), int64(), int32(), int64(), int64(), drafts);
    (numbers, load, vec(output(), 0..20))
        .prop_map(|(numbers, load, outputs)| {
            let (
                step,
                ms,
                waited_us,
                prefill_tokens,
                prefill_context,
                decode_rows,
                kv_tokens,
                waiting_tokens,
                (drafted, accepted),
            ) = numbers;
            Step {
                step,
                ms,
                waited_us,
                prefill_tokens,
                prefill_context,
                decode_rows,
                kv_tokens,
                waiting_tokens,
                drafted,
                accepted,
                load,
                outputs,
            }
        })
        .boxed()
}

fn grammar() -> BoxedStrategy<Grammar> {
    let source = text().prop_filter("a longer one is refused", |text| text.len() <= 1 << 16);
    (word(), source).prop_map(|(kind, source)| Grammar { kind, source: source.into() }).boxed()
}

fn reasoning() -> BoxedStrategy<Reasoning> {
    let markers = (vec(int32(), 0..32), vec(int32(), 1..32), vec(int32(), 0..32));
    (markers, option::of(int32()), any::<u32>())
        .prop_map(|((begin, end, ends_too), max_tokens, begun)| {
            let begun = begun % u32::try_from(end.len()).unwrap_or(1);
            Reasoning { begin, end, max_tokens, begun, ends_too }
        })
        .boxed()
}

fn grammar_totals() -> BoxedStrategy<GrammarTotals> {
    let masks = (int64(), int64(), int64(), int64(), int64());
    let grammars = (int64(), int64(), int64(), int64(), int64());
    (masks, grammars)
        .prop_map(|(masks, grammars)| {
            let (masks, mask_us, late, wait_us, put_off) = masks;
            let (compiled, compile_us, known, refused, memory_bytes) = grammars;
            GrammarTotals {
                masks,
                mask_us,
                late,
                wait_us,
                compiled,
                compile_us,
                known,
                put_off,
                refused,
                memory_bytes,
            }
        })
        .boxed()
}

fn sampling() -> BoxedStrategy<Sampling> {
    let reals = (real(), real(), real(), real(), real(), real());
    let rest = (
        int32(),
        int64(),
        option::of(int32()),
        option::of(int32()),
        vec(ranked(), 0..20),
        any::<bool>(),
        int32(),
        option::of(grammar()),
        option::of(reasoning()),
        option::of(token_limits()),
    );
    (reals, rest)
        .prop_map(|(reals, rest)| {
            let (
                temperature,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
            ) = reals;
            let (
                top_k,
                seed,
                logprobs,
                prompt_logprobs,
                logit_bias,
                ignore_eos,
                min_tokens,
                grammar,
                reasoning,
                limits,
            ) = rest;
            Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                seed,
                logprobs,
                prompt_logprobs,
                logit_bias,
                ignore_eos,
                min_tokens,
                grammar,
                reasoning,
                limits,
            }
        })
        .boxed()
}

fn token_limits() -> BoxedStrategy<TokenLimits> {
    (vec(int32(), 0..5), vec(vec(int32(), 1..4), 0..4))
        .prop_map(|(allowed, words)| {
            let lengths = words.iter().map(|word| u32::try_from(word.len()).unwrap()).collect();
            TokenLimits { allowed, banned: words.concat(), lengths }
        })
        .boxed()
}

fn kv_from() -> BoxedStrategy<KvFrom> {
    (text(), vec(text(), 0..3), int32(), pull_key())
        .prop_map(|(worker, transfer, timeout_ms, pull_key)| KvFrom {
            worker,
            transfer,
            timeout_ms,
            pull_key,
        })
        .boxed()
}

fn kv_transfer() -> BoxedStrategy<KvTransfer> {
    (int32(), pull_key()).prop_map(|(lease_ms, pull_key)| KvTransfer { lease_ms, pull_key }).boxed()
}

fn migration_order() -> BoxedStrategy<MigrationOrder> {
    (int32(), pull_key()).prop_map(|(blocks, pull_key)| MigrationOrder { blocks, pull_key }).boxed()
}

fn pull_key() -> BoxedStrategy<PullKey> {
    any::<[u8; 32]>().prop_map(PullKey).boxed()
}

fn refuse() -> BoxedStrategy<Refuse> {
    (word::<RefuseReason>(), text(), int32(), text(), text(), text(), text())
        .prop_map(|(reason, router, ms, field, expected, got, message)| {
            let retry_after_ms = reason.says_when().then_some(ms);
            Refuse { reason, router, retry_after_ms, field, expected, got, message }
        })
        .boxed()
}

/// Any word of a closed set.
fn word<T: Word + std::fmt::Debug>() -> BoxedStrategy<T> {
    proptest::sample::select(T::ALL).boxed()
}

fn group_totals() -> BoxedStrategy<GroupTotals> {
    ((int64(), real(), int64(), int64(), int64(), int64()), (real(), real(), real()))
        .prop_map(
            |((held_rounds, held_ms, waves, slots, bytes, refused), (gain_s, cost_s, spent_s))| {
                GroupTotals {
                    held_rounds,
                    held_ms,
                    waves,
                    slots,
                    bytes,
                    refused,
                    gain_s,
                    cost_s,
                    spent_s,
                }
            },
        )
        .boxed()
}

fn transferred() -> BoxedStrategy<Transferred> {
    (request(), text(), option::of(word()), int32(), int64(), real(), option::of(word()))
        .prop_map(|(request, worker, backend, blocks, bytes, ms, error)| Transferred {
            request,
            worker,
            backend,
            blocks,
            bytes,
            ms,
            error,
        })
        .boxed()
}

fn submit() -> BoxedStrategy<Submit> {
    let resume =
        (bytes(), int64()).prop_map(|(generated, rng_counter)| Resume { generated, rng_counter });
    (
        request(),
        bytes(),
        sampling(),
        vec(int32(), 0..20),
        int32(),
        option::of(int64()),
        any::<i8>(),
        bytes(),
        (option::of(kv_from()), option::of(resume)),
        (option::of(kv_transfer()), option::of(word())),
        ("[!-~]{0,128}", option::of(trace())),
    )
        .prop_map(
            |(
                request,
                tokens,
                sampling,
                stop_ids,
                max_tokens,
                deadline_ms,
                priority,
                salt,
                (kv_from, resume),
                (kv_transfer, pooling),
                (request_id, trace),
            )| Submit {
                request,
                tokens,
                sampling,
                stop_ids,
                max_tokens,
                deadline_ms,
                priority,
                salt,
                kv_from,
                resume,
                kv_transfer,
                pooling,
                request_id: request_id.into(),
                trace,
            },
        )
        .boxed()
}

fn trace() -> BoxedStrategy<Box<TraceContext>> {
    let parent = (any::<[u8; 16]>(), any::<[u8; 8]>(), any::<bool>())
        .prop_filter("not zeros", |(trace, span, _)| *trace != [0; 16] && *span != [0; 8])
        .prop_map(|(trace, span, sampled)| TraceParent { trace, span, sampled });
    let state = option::of("[ -~]{1,512}".prop_map(|text| text.parse().expect("it is printable")));
    (parent, state).prop_map(|(parent, state)| Box::new(TraceContext { parent, state })).boxed()
}
