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
        (refused(|a| a.policy = "random".into()), "--policy"),
        (refused(|a| a.secret = Some("short".into())), "--secret-file"),
        (refused(|a| a.worker_tls_cert = Some("x.pem".into())), "--worker-tls-key"),
        (refused(|a| a.token_timeout_ms = 0), "--token-timeout-ms"),
        (refused(|a| a.max_streams = 0), "--max-streams"),
        (refused(|a| a.heartbeat_timeout_ms = 3_000), "--heartbeat-timeout-ms"),
        (refused(|a| a.tokenizer_threads = 5_000), "--tokenizer-threads"),
        (refused(|a| a.log_format = "xml".into()), "--log-format"),
        (refused(|a| a.log_level = "a=b=c".into()), "--log-level"),
        (refused(|a| a.shadow = Some("random".into())), "--shadow"),
        (refused(|a| a.shadow = Some(a.policy.clone())), "--shadow"),
        (refused(|a| a.worker_queue_ms = 0), "--worker-queue-ms"),
        (refused(|a| a.queue_ageing_ms = 0), "--queue-ageing-ms"),
        (refused(|a| a.queue_floors = vec![0.5, 0.2]), "--queue-floors"),
        (refused(|a| a.queue_floors = vec![0.5, 0.2, -0.1]), "--queue-floors"),
        (refused(|a| a.queue_floors = vec![0.5, 0.2, f64::NAN]), "--queue-floors"),
        (refused(|a| a.queue_floors = vec![0.5, 0.5, 0.1]), "--queue-floors"),
        (refused(|a| a.slo_tpot_ms = -1.0), "--slo-tpot-ms"),
        (refused(|a| a.slo_tpot_ms = f64::NAN), "--slo-tpot-ms"),
        (refused(|a| a.decision_log_bytes = 100), "--decision-log-bytes"),
        (refused(|a| a.decision_log = Some("/".into())), "--decision-log"),
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
