//! Every flag that cannot be right is named with a remedy.

use super::*;

fn refused(change: impl FnOnce(&mut RouterArgs)) -> String {
    let mut args = RouterArgs::default();
    change(&mut args);
    Config::try_from(args).unwrap_err().to_string()
}

#[test]
fn the_defaults_are_right() {
    let config = Config::try_from(RouterArgs::default()).unwrap();
    assert_eq!(config.http.max_body_bytes, 16 << 20);
    assert_eq!(config.fleet.listen, WorkerListen::Tcp("127.0.0.1:8001".into()));
    assert!(config.tokenizer.threads >= 1);
    assert!(config.per_core);
    let routing = config.routing;
    assert_eq!(routing.queue.floors, [0.05, 0.2, 0.5]); // lowest class first
    assert_eq!((routing.queue.ageing_ms, routing.worker_queue_ms), (10_000.0, 5_000.0));
    assert!(routing.ttft_deadline.is_none() && routing.slo_tpot_ms.is_none());
    assert!(routing.shadow.is_none() && routing.decision_log.is_none());
}

#[test]
fn every_error_names_its_flag_and_a_remedy() {
    for (message, name) in [
        (refused(|a| a.worker_listen = "8001".into()), "--worker-listen"),
        (refused(|a| a.worker_listen = "::1:8001x".into()), "--worker-listen"),
        (refused(|a| a.worker_listen = "unix:".into()), "--worker-listen"),
        (refused(|a| a.worker_socket = Some("".into())), "--worker-socket"),
        (refused(|a| a.policy = "random".into()), "--policy"),
        (refused(|a| a.secret = Some("short".into())), "--secret-file"),
        (refused(|a| a.worker_tls_cert = Some("x.pem".into())), "--worker-tls-key"),
        (refused(|a| a.worker_tls_key = Some("x.pem".into())), "--worker-tls-cert"),
        (refused(|a| a.worker_tls_client_ca = Some("x.pem".into())), "--worker-tls-cert"),
        (refused(|a| a.tls_cert = Some("x.pem".into())), "--tls-key"),
        (refused(|a| a.tls_key = Some("x.pem".into())), "--tls-cert"),
        (refused(|a| a.tls_client_ca = Some("x.pem".into())), "--tls-cert"),
        (refused(|a| a.token_timeout_ms = 0), "--token-timeout-ms"),
        (refused(|a| a.max_streams = 0), "--max-streams"),
        (refused(|a| a.heartbeat_timeout_ms = 3_000), "--heartbeat-timeout-ms"),
        (refused(|a| a.tokenizer_threads = 5_000), "--tokenizer-threads"),
        (refused(|a| a.log_format = "xml".into()), "--log-format"),
        (refused(|a| a.runtime = "one".into()), "--runtime"),
        (refused(|a| a.log_level = "a=b=c".into()), "--log-level"),
        (refused(|a| a.shadow = Some("random".into())), "--shadow"),
        (refused(|a| a.shadow = Some(a.policy.clone())), "--shadow"),
        (refused(|a| a.worker_queue_ms = 0), "--worker-queue-ms"),
        (refused(|a| a.queue_ageing_ms = 0), "--queue-ageing-ms"),
        (refused(|a| a.gather_ms = -0.1), "--gather-ms"),
        (refused(|a| a.gather_ms = 1_000.1), "--gather-ms"),
        (refused(|a| a.gather_ms = f64::NAN), "--gather-ms"),
        (refused(|a| a.queue_floors = vec![0.5, 0.2]), "--queue-floors"),
        (refused(|a| a.queue_floors = vec![0.5, 0.2, -0.1]), "--queue-floors"),
        (refused(|a| a.queue_floors = vec![0.5, 0.2, f64::NAN]), "--queue-floors"),
        (refused(|a| a.queue_floors = vec![0.5, 0.5, 0.1]), "--queue-floors"),
        (refused(|a| a.slo_tpot_ms = -1.0), "--slo-tpot-ms"),
        (refused(|a| a.slo_tpot_ms = f64::NAN), "--slo-tpot-ms"),
        (refused(|a| a.decision_log_bytes = 100), "--decision-log-bytes"),
        (refused(|a| a.decision_log = Some("/".into())), "--decision-log"),
        (refused(|a| a.response_store = Some(std::env::temp_dir())), "--response-store"),
        (refused(|a| a.decision_log = Some(std::env::temp_dir())), "--decision-log"),
    ] {
        assert!(message.starts_with(name), "{message}");
        assert!(message.contains("; "), "no remedy in {message}");
    }
    let message = refused(|a| a.secret_file = Some("/nonexistent/secret".into()));
    assert!(message.starts_with("--secret-file: cannot read"), "{message}");
}

#[test]
fn addresses_of_all_kinds_are_read() {
    for text in ["127.0.0.1:0", "[::1]:8001", "localhost:9000"] {
        assert_eq!(listen("worker-listen", text).unwrap(), WorkerListen::Tcp(text.into()));
    }
    assert_eq!(listen("worker-listen", "unix:/a/b").unwrap(), WorkerListen::Unix("/a/b".into()));
}

#[test]
fn a_dict_takes_the_same_names_and_no_others() {
    let args: RouterArgs = serde_json::from_str(r#"{"port": 0, "api_key": ["k"]}"#).unwrap();
    assert_eq!((args.port, args.api_key.len()), (0, 1));
    let error = serde_json::from_str::<RouterArgs>(r#"{"prot": 1}"#).unwrap_err().to_string();
    assert!(error.contains("prot"), "{error}");
}

#[test]
fn secrets_do_not_show() {
    assert!(!format!("{:?}", Secret("hunter22".into())).contains("hunter"));
}

fn accepted(change: impl FnOnce(&mut RouterArgs)) -> Config {
    let mut args = RouterArgs::default();
    change(&mut args);
    Config::try_from(args).unwrap()
}

#[test]
fn every_time_comes_from_its_own_flag() {
    let config = accepted(|a| {
        (a.queue_timeout_ms, a.submit_timeout_ms, a.first_token_timeout_ms) = (11, 12, 13);
        (a.token_timeout_ms, a.stall_timeout_ms, a.request_timeout_ms) = (14, 15, 16);
        (a.header_timeout_ms, a.body_timeout_ms, a.drain_timeout_ms) = (17, 18, 19);
        (a.heartbeat_ms, a.heartbeat_timeout_ms, a.kv_lease_ms) = (20, 61, 22);
        (a.transfer_timeout_ms, a.handshake_timeout_ms, a.first_byte_timeout_ms) = (23, 24, 25);
        (a.describe_timeout_ms, a.worker_queue_ms, a.queue_ageing_ms) = (26, 27, 28);
        (a.ttft_deadline_ms, a.slo_tpot_ms, a.gather_ms) = (29, 30.5, 31.5);
    });
    let Deadlines { queue, submit, first_token, token, stall, request } = config.deadlines;
    let (http, fleet, routing) = (config.http, config.fleet, config.routing);
    let ms = |times: &[Duration]| times.iter().map(Duration::as_millis).collect::<Vec<_>>();
    assert_eq!(ms(&[queue, submit, first_token, token, stall, request]), [11, 12, 13, 14, 15, 16]);
    let others = [http.header_timeout, http.body_timeout, config.drain_timeout];
    assert_eq!(ms(&others), [17, 18, 19]);
    let signs = [fleet.heartbeat, fleet.heartbeat_timeout, fleet.kv_lease, fleet.transfer_timeout];
    assert_eq!(ms(&signs), [20, 61, 22, 23]);
    let dials = [fleet.handshake_timeout, fleet.limits.first_byte, fleet.describe_timeout];
    assert_eq!(ms(&dials), [24, 25, 26]);
    assert_eq!((routing.worker_queue_ms, routing.queue.ageing_ms), (27.0, 28.0));
    assert_eq!(routing.ttft_deadline, Some(Duration::from_millis(29)));
    assert_eq!((routing.slo_tpot_ms, routing.gather_ms), (Some(30.5), 31.5));
}

#[test]
fn every_bound_comes_from_its_own_flag() {
    let config = accepted(|a| {
        (a.queue_requests, a.queue_tokens, a.queue_bytes) = (31, 32, 33);
        (a.max_index_blocks, a.max_description_bytes) = (34, 35);
        (a.max_streams, a.tenant_streams, a.max_connections) = (36, 37, 38);
    });
    let queue = config.routing.queue;
    assert_eq!((queue.requests, queue.tokens, queue.bytes), (31, 32, 33));
    let limits = config.fleet.limits;
    assert_eq!((limits.index_blocks, limits.description_bytes), (34, 35));
    let bounds = (config.bounds.streams, config.bounds.tenant_streams);
    assert_eq!((bounds, config.http.max_connections), ((36, Some(37)), 38));
    assert_eq!(accepted(|a| a.tenant_streams = 0).bounds.tenant_streams, None);
}

#[test]
fn what_is_just_within_a_bound_is_taken_and_what_is_just_past_it_is_not() {
    let hour = |a: &mut RouterArgs, ms| (a.heartbeat_ms, a.heartbeat_timeout_ms) = (ms, 3 * ms + 1);
    accepted(|a| hour(a, 3_600_000));
    accepted(|a| a.tokenizer_threads = 1_024);
    accepted(|a| a.secret = Some("8 bytes.\n".into()));
    accepted(|a| a.max_index_blocks = 1 << 36);
    accepted(|a| a.decision_log_bytes = 64 << 10);
    accepted(|a| a.queue_floors = vec![0.7, 0.2, 0.1]);
    accepted(|a| a.slo_tpot_ms = 3_600_000.0);
    for (message, name) in [
        (refused(|a| hour(a, 3_600_001)), "--heartbeat-ms"),
        (refused(|a| (a.heartbeat_ms, a.heartbeat_timeout_ms) = (50, 150)), "--heartbeat-timeout"),
        (refused(|a| a.tokenizer_threads = 1_025), "--tokenizer-threads"),
        (refused(|a| a.secret = Some("7 bytes\n".into())), "--secret-file"),
        (refused(|a| a.max_index_blocks = (1 << 36) + 1), "--max-index-blocks"),
        (refused(|a| a.max_description_bytes = 0), "--max-description-bytes"),
        (refused(|a| a.decision_log_bytes = (64 << 10) - 1), "--decision-log-bytes"),
        (refused(|a| a.queue_floors = vec![0.7, 0.2, 0.101]), "--queue-floors"),
        (refused(|a| a.slo_tpot_ms = 3_600_000.5), "--slo-tpot-ms"),
        (refused(|a| a.worker_listen = ":8001".into()), "--worker-listen"),
    ] {
        assert!(message.starts_with(name), "{message}");
    }
}

#[test]
fn memory_of_bodies_and_answers_is_enough_for_one_and_bounded_for_all() {
    let with = |bodies: usize| {
        move |a: &mut RouterArgs| {
            (a.max_body_bytes, a.max_body_memory_bytes) = (1 << 20, bodies);
        }
    };
    let least = 6 << 20;
    let error = refused(with(least - 1));
    assert!(error.starts_with("--max-body-memory-bytes: ") && error.contains("6291456"), "{error}");
    let memory = accepted(with(least)).memory;
    assert_eq!((memory.bodies, memory.body), (least, least), "one body may take it all");
    let memory = accepted(with(1 << 30)).memory;
    assert_eq!((memory.bodies, memory.body), (1 << 30, (8 << 20) + (4 << 20)));
    let memory = accepted(|a| a.max_answer_memory_bytes = 1 << 20).memory;
    assert_eq!((memory.answers, memory.answer), (1 << 20, 1 << 19));
    let error = refused(|a| a.max_answer_memory_bytes = (1 << 20) - 1);
    assert!(error.starts_with("--max-answer-memory-bytes: "), "{error}");
}
